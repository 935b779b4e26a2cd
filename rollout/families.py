"""Families of small terminal jobs. A task is composed of one to nine of these sub-tasks.

A family is one function: from a source of words it makes a clause of the instruction, the files that exist at the
start, the reference commands and the checks. ``habit`` is the mistake that a careless agent makes on the same job; the
synthetic base corpus uses it, the tasks do not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

WORDS = [
    "acorn",
    "amber",
    "apple",
    "anchor",
    "aspen",
    "badge",
    "bagel",
    "basil",
    "beach",
    "berry",
    "birch",
    "bison",
    "bloom",
    "brick",
    "brook",
    "brush",
    "cabin",
    "cactus",
    "camel",
    "candle",
    "canoe",
    "cargo",
    "cedar",
    "chalk",
    "cherry",
    "cliff",
    "cloud",
    "clover",
    "cobra",
    "comet",
    "copper",
    "coral",
    "cotton",
    "crane",
    "creek",
    "crow",
    "daisy",
    "delta",
    "denim",
    "dingo",
    "dove",
    "drum",
    "eagle",
    "ember",
    "fable",
    "falcon",
    "fern",
    "ferry",
    "finch",
    "flame",
    "flint",
    "flute",
    "forest",
    "fox",
    "frost",
    "garlic",
    "gecko",
    "ginger",
    "glacier",
    "grape",
    "gravel",
    "hazel",
    "heron",
    "honey",
    "iris",
    "ivory",
    "jade",
    "jelly",
    "juniper",
    "kayak",
    "kiwi",
    "koala",
    "lagoon",
    "lantern",
    "lemon",
    "lilac",
    "lily",
    "linen",
    "lotus",
    "lynx",
    "magnet",
    "mango",
    "maple",
    "marble",
    "meadow",
    "melon",
    "mint",
    "moose",
    "moss",
    "nectar",
    "nickel",
    "oasis",
    "ocean",
    "olive",
    "onion",
    "opal",
    "orbit",
    "otter",
    "owl",
    "panda",
    "papaya",
    "pearl",
    "pebble",
    "pepper",
    "piano",
    "pine",
    "plum",
    "pony",
    "poppy",
    "prism",
    "quartz",
    "rabbit",
    "raven",
    "reef",
    "ribbon",
    "river",
    "robin",
    "rose",
    "ruby",
    "saddle",
    "salmon",
    "sand",
    "scarf",
    "shell",
    "silver",
    "sparrow",
    "spruce",
    "storm",
    "sugar",
    "swan",
    "tiger",
    "timber",
    "topaz",
    "tulip",
    "turtle",
    "velvet",
    "violet",
    "walnut",
    "willow",
    "wolf",
    "zebra",
]


@dataclass(frozen=True)
class Check:
    """``test`` is a bash condition run in the work folder. ``initially`` says that it holds before the agent acts."""

    name: str
    test: str
    initially: bool = False


@dataclass(frozen=True)
class SubTask:
    """One job. ``wordings`` are phrasings of the same clause, the last one kept for held-out tasks.

    ``commands`` solve it; ``habit`` is (index of a command, the wrong command typed there); ``hint`` is what a good
    runbook says about it, without any deliverable.
    """

    family: str
    words: tuple[str, ...]
    wordings: tuple[str, ...]
    files: dict[str, str]
    commands: tuple[str, ...]
    checks: tuple[Check, ...]
    habit: tuple[int, str]
    hint: str
    secret: str = ""  # a value found only in the files, which a runbook must not give away
    folders: tuple[str, ...] = field(default=())


Draw = Iterator[str]


def _lines(rng: random.Random, words: list[str], low: int = 2, high: int = 4) -> list[str]:
    return [rng.choice(words) for _ in range(rng.randint(low, high))]


def create(draw: Draw, rng: random.Random) -> SubTask:
    f, a, b = next(draw), next(draw), next(draw)
    return SubTask(
        "create",
        (f, a, b),
        (f"create {f}.txt with text {a} {b}", f"write {a} {b} to new file {f}.txt", f"write {a} {b} to {f}.txt"),
        {},
        (f"echo {a} {b} > {f}.txt",),
        (Check("content", f'[[ "$(<{f}.txt)" == "{a} {b}" ]]'),),
        (0, f"echo {a} > {f}.txt"),
        "echo all words",
    )


def append(draw: Draw, rng: random.Random) -> SubTask:
    f, old, new = next(draw), next(draw), next(draw)
    return SubTask(
        "append",
        (f, old, new),
        (f"append {new} to {f}.txt", f"add line {new} at end of {f}.txt", f"add {new} to end of {f}.txt"),
        {f"{f}.txt": f"{old}\n"},
        (f"echo {new} >> {f}.txt",),
        (
            Check("added", f'[[ "$(tail -n 1 {f}.txt)" == {new} ]]'),
            Check("kept", f'[[ "$(head -n 1 {f}.txt)" == {old} ]]', initially=True),
        ),
        (0, f"echo {new} > {f}.txt"),
        "echo >> not >",
    )


def move(draw: Draw, rng: random.Random) -> SubTask:
    f, d, text = next(draw), next(draw), next(draw)
    return SubTask(
        "move",
        (f, d),
        (f"move {f}.txt to folder {d}", f"put {f}.txt into folder {d}", f"move {f}.txt into {d}"),
        {f"{f}.txt": f"{text}\n"},
        (f"mv {f}.txt {d}",),
        (Check("arrived", f'[[ "$(<{d}/{f}.txt)" == {text} ]]'), Check("gone", f"[[ ! -e {f}.txt ]]")),
        (0, f"cp {f}.txt {d}"),
        "mv not cp",
        folders=(d,),
    )


def copy(draw: Draw, rng: random.Random) -> SubTask:
    f, g, text = next(draw), next(draw), next(draw)
    return SubTask(
        "copy",
        (f, g),
        (f"copy {f}.txt to {g}.txt", f"make a copy of {f}.txt called {g}.txt", f"make copy of {f}.txt in {g}.txt"),
        {f"{f}.txt": f"{text}\n"},
        (f"cp {f}.txt {g}.txt",),
        (
            Check("copied", f'[[ "$(<{g}.txt)" == {text} ]]'),
            Check("source", f'[[ "$(<{f}.txt)" == {text} ]]', initially=True),
        ),
        (0, f"mv {f}.txt {g}.txt"),
        "cp not mv",
    )


def config(draw: Draw, rng: random.Random) -> SubTask:
    f, old, new, other = next(draw), next(draw), next(draw), next(draw)
    key, key2 = rng.sample(["mode", "color", "level", "host"], 2)
    return SubTask(
        "config",
        (f, old, new),
        (
            f"in {f}.conf change {key} {old} to {new}",
            f"set {key} from {old} to {new} in {f}.conf",
            f"in {f}.conf set {key} from {old} to {new}",
        ),
        {f"{f}.conf": f"{key2} {other}\n{key} {old}\n"},
        (f"sed -i 's/ {old}/ {new}/' {f}.conf",),
        (
            Check("changed", f'grep -qx "{key} {new}" {f}.conf'),
            Check("rest", f'grep -qx "{key2} {other}" {f}.conf', initially=True),
        ),
        (0, f"sed 's/ {old}/ {new}/' {f}.conf"),
        "sed -i",
    )


def _log(rng: random.Random, draw: Draw) -> tuple[str, str, list[str]]:
    wanted, other = next(draw), next(draw)
    lines = [wanted] * rng.randint(2, 4) + [other] * rng.randint(1, 3)
    rng.shuffle(lines)
    return wanted, other, lines


def count(draw: Draw, rng: random.Random) -> SubTask:
    f, g = next(draw), next(draw)
    wanted, _, lines = _log(rng, draw)
    number = lines.count(wanted)
    return SubTask(
        "count",
        (f, g, wanted),
        (
            f"count lines with {wanted} in {f}.log into {g}.txt",
            f"write number of {wanted} lines of {f}.log to {g}.txt",
            f"write number of lines with {wanted} in {f}.log to {g}.txt",
        ),
        {f"{f}.log": "\n".join(lines) + "\n"},
        (f"grep -c {wanted} {f}.log > {g}.txt",),
        (Check("number", f'[[ "$(<{g}.txt)" == {number} ]]'),),
        (0, f"grep {wanted} {f}.log > {g}.txt"),
        "grep -c",
    )


def select(draw: Draw, rng: random.Random) -> SubTask:
    f, g = next(draw), next(draw)
    wanted, other, lines = _log(rng, draw)
    number = lines.count(wanted)
    return SubTask(
        "select",
        (f, g, wanted),
        (
            f"copy only {wanted} lines of {f}.log to {g}.txt",
            f"filter {f}.log for {wanted} into {g}.txt",
            f"filter {wanted} lines of {f}.log into {g}.txt",
        ),
        {f"{f}.log": "\n".join(lines) + "\n"},
        (f"grep {wanted} {f}.log > {g}.txt",),
        (
            Check("lines", f'[[ "$(grep -cx {wanted} {g}.txt)" == {number} ]]'),
            Check("only", f"[[ -f {g}.txt ]] && ! grep -q {other} {g}.txt"),
        ),
        (0, f"cat {f}.log > {g}.txt"),
        "grep not cat",
    )


def notes(draw: Draw, rng: random.Random, hops: int | None = None) -> SubTask:
    hops = hops or rng.choice((1, 1, 2))
    names = [next(draw) for _ in range(hops + 1)]
    g, word = next(draw), next(draw)
    files = {f"{a}.note": f"see {b}.note\n" for a, b in zip(names, names[1:], strict=False)}
    files[f"{names[-1]}.note"] = f"word {word}\n"
    commands = tuple(f"cat {n}.note" for n in names) + (f"echo {word} > {g}.txt",)
    return SubTask(
        "notes",
        (names[0], g, word),
        (
            f"follow notes from {names[0]}.note and write last word to {g}.txt",
            f"read {names[0]}.note and on then put word in {g}.txt",
            f"read notes from {names[0]}.note and put last word in {g}.txt",
        ),
        files,
        commands,
        (Check("word", f'[[ "$(<{g}.txt)" == {word} ]]'),),
        (len(commands) - 1, f"cat {names[-1]}.note > {g}.txt"),
        "cat to the end then echo",
        secret=word,
    )


def fix(draw: Draw, rng: random.Random) -> SubTask:
    f, old, new = next(draw), next(draw), next(draw)
    test = f'[ "$(bash {f}.sh)" = "{f} {new}" ] || echo want {new} not {old}\n'
    return SubTask(
        "fix",
        (f, old, new),
        (
            f"fix {f}.sh so that {f}.test passes",
            f"make {f}.test pass by fixing {f}.sh",
            f"make {f}.test pass fix {f}.sh",
        ),
        {f"{f}.sh": f"echo {f} {old}\n", f"{f}.test": test},
        (f"bash {f}.test", f"sed -i 's/ {old}/ {new}/' {f}.sh"),
        (
            Check("passes", f'[[ "$(bash {f}.sh)" == "{f} {new}" ]]'),
            Check("untouched", f'grep -q "want {new} not" {f}.test', initially=True),
        ),
        (1, f"sed -i 's/ {old}/ {new}/' {f}.test"),
        "bash test then sed -i sh",
        secret=new,
    )


def script_mode(draw: Draw, rng: random.Random) -> SubTask:
    f = next(draw)
    return SubTask(
        "script_mode",
        (f,),
        (f"make {f}.sh executable", f"allow running of {f}.sh", f"allow {f}.sh running"),
        {f"{f}.sh": f"echo {f}\n"},
        (f"chmod +x {f}.sh",),
        (Check("executable", f"[[ -x {f}.sh ]]"),),
        (0, f"chmod -x {f}.sh"),
        "chmod +x",
    )


def key_mode(draw: Draw, rng: random.Random) -> SubTask:
    f = next(draw)
    return SubTask(
        "key_mode",
        (f,),
        (f"let only owner read {f}.key", f"make {f}.key private", f"make {f}.key private to owner"),
        {f"{f}.key": f"{f}\n"},
        (f"chmod 600 {f}.key",),
        (Check("mode", f'[[ "$(stat -c %a {f}.key)" == 600 ]]'),),
        (0, f"chmod 644 {f}.key"),
        "chmod 600",
    )


def pack(draw: Draw, rng: random.Random) -> SubTask:
    d, f = next(draw), next(draw)
    inside = [next(draw) for _ in range(rng.choice((1, 2, 2, 3, 9)))]
    listed = f'"$(tar tf {f}.tar)" =='
    return SubTask(
        "pack",
        (d, f),
        (f"pack folder {d} into {f}.tar", f"make archive {f}.tar of folder {d}", f"pack {d} into archive {f}.tar"),
        {f"{d}/{name}.txt": f"{name}\n" for name in inside},
        (f"tar cf {f}.tar {d}",),
        (Check("archive", f"tar tf {f}.tar"),)
        + tuple(Check(f"has-{n}", f"[[ {listed} *{d}/{name}.txt* ]]") for n, name in enumerate(inside)),
        (0, f"tar tf {f}.tar {d}"),
        "tar cf",
        folders=(d,),
    )


def checksum(draw: Draw, rng: random.Random) -> SubTask:
    f, g = next(draw), next(draw)
    return SubTask(
        "checksum",
        (f, g),
        (
            f"write sha256 of {f}.txt to {g}.sum",
            f"save checksum of {f}.txt in {g}.sum",
            f"save sha256 of {f}.txt in {g}.sum",
        ),
        {f"{f}.txt": f"{f} {g}\n"},
        (f"sha256sum {f}.txt > {g}.sum",),
        (Check("written", f"[[ -s {g}.sum ]]"), Check("right", f"sha256sum --status --strict -c {g}.sum")),
        (0, f"md5sum {f}.txt > {g}.sum"),
        "sha256sum",
    )


def order(draw: Draw, rng: random.Random) -> SubTask:
    f, g = next(draw), next(draw)
    lines = [next(draw) for _ in range(3)]
    sorted_text = " ".join(sorted(lines))
    return SubTask(
        "order",
        (f, g),
        (
            f"sort {f}.list into {g}.list",
            f"write sorted lines of {f}.list to {g}.list",
            f"write {f}.list sorted to {g}.list",
        ),
        {f"{f}.list": "\n".join(lines) + "\n"},
        (f"sort {f}.list > {g}.list",),
        (Check("sorted", f'[[ "$(tr \'\\n\' " " < {g}.list)" == "{sorted_text} " ]]'),),
        (0, f"sort -r {f}.list > {g}.list"),
        "sort no -r",
    )


def remove(draw: Draw, rng: random.Random) -> SubTask:
    f = next(draw)
    return SubTask(
        "remove",
        (f,),
        (f"delete {f}.tmp but keep {f}.bak", f"remove {f}.tmp and not {f}.bak", f"remove {f}.tmp but keep {f}.bak"),
        {f"{f}.tmp": f"{f}\n", f"{f}.bak": f"{f}\n"},
        (f"rm {f}.tmp",),
        (Check("gone", f"[[ ! -e {f}.tmp ]]"), Check("kept", f"[[ -e {f}.bak ]]", initially=True)),
        (0, f"rm {f}.bak"),
        "rm tmp only",
    )


FAMILIES: dict[str, Callable[[Draw, random.Random], SubTask]] = {
    f.__name__: f
    for f in (
        create,
        append,
        move,
        copy,
        config,
        count,
        select,
        notes,
        fix,
        script_mode,
        key_mode,
        pack,
        checksum,
        order,
        remove,
    )
}
