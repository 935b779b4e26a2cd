"""Writes suites of small Harbor tasks: train, validation, core, ladder_4, ladder_5, ... and long.

Every sub-task instance (family and its names) belongs by hash to exactly one of train, validation and held-out, so no
instance is shared, not even inside longer tasks. Held-out tasks also use phrasings that no training task uses.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .families import FAMILIES, WORDS, SubTask, notes
from .hygiene import write_checked
from .tasks import folder_hash, load_suite

GROUPS = {"train": range(0, 10), "validation": range(10, 13), "heldout": range(13, 16)}
MAX_SUBTASKS = 9


class SuiteSizes(Protocol):
    """What ``generate_suites`` reads of the configuration's ``[tasks]`` table."""

    @property
    def num_train(self) -> int: ...
    @property
    def num_validation(self) -> int: ...
    @property
    def num_core(self) -> int: ...
    @property
    def num_ladder(self) -> int: ...
    @property
    def num_long(self) -> int: ...
    @property
    def ladder_rungs(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Composite:
    """A task before it is written: its sub-tasks and, for each, the clause of the instruction."""

    subtasks: tuple[SubTask, ...]
    clauses: tuple[str, ...]

    @property
    def instruction(self) -> str:
        return "\n".join(f"{n} {clause}" for n, clause in enumerate(self.clauses, start=1))

    @property
    def num_commands(self) -> int:
        return sum(len(s.commands) for s in self.subtasks)

    @property
    def files(self) -> dict[str, str]:
        return {path: text for s in self.subtasks for path, text in s.files.items()}

    @property
    def folders(self) -> list[str]:
        return [d for s in self.subtasks for d in s.folders]

    @property
    def baseline(self) -> float:
        """Fraction of checks that hold before anything is done (f0 of the reward)."""
        checks = [c for s in self.subtasks for c in s.checks]
        return sum(c.initially for c in checks) / len(checks)


def group_of(subtask: SubTask) -> str:
    digest = hashlib.blake2b(f"{subtask.family}:{':'.join(subtask.words)}".encode(), digest_size=8).digest()
    slot = int.from_bytes(digest, "big") % 16
    return next(name for name, slots in GROUPS.items() if slot in slots)


def _words(rng: random.Random) -> Iterator[str]:
    return iter(rng.sample(WORDS, len(WORDS)))


def draw_subtask(rng: random.Random, draw: Iterator[str], group: str, family: str | None = None) -> SubTask:
    """Draws until the instance falls into ``group``. Uses up words, so one task never reuses a name."""
    name = family or rng.choice(list(FAMILIES))
    while True:
        subtask = FAMILIES[name](draw, rng)
        if group_of(subtask) == group:
            return subtask


def compose(
    rng: random.Random, num_subtasks: int, group: str, make: Callable[..., SubTask] = draw_subtask
) -> Composite:
    """Draws a task of ``num_subtasks`` sub-tasks. Starts again when the words run out."""
    while True:
        draw = _words(rng)
        try:
            subtasks = tuple(make(rng, draw, group) for _ in range(num_subtasks))
        except (StopIteration, RuntimeError):
            continue
        return Composite(subtasks, tuple(_clause(rng, s, group) for s in subtasks))


def _clause(rng: random.Random, subtask: SubTask, group: str) -> str:
    if group == "heldout" and rng.random() < 0.25:
        return subtask.wordings[-1]
    return rng.choice(subtask.wordings[:-1])


def _long_subtask(rng: random.Random, draw: Iterator[str], group: str) -> SubTask:
    """Half of the sub-tasks of long tasks need several commands."""
    family = rng.choice(("notes", "fix") if rng.random() < 0.5 else tuple(FAMILIES))
    while True:
        subtask = notes(draw, rng, hops=rng.choice((2, 3, 3))) if family == "notes" else FAMILIES[family](draw, rng)
        if group_of(subtask) == group:
            return subtask


def compose_long(rng: random.Random, group: str, low: int, high: int) -> Composite:
    """A task of 9 sub-tasks or fewer that needs between ``low`` and ``high`` commands."""
    while True:
        task = compose(rng, rng.choice((7, 8, 9) if low < 20 else (9,)), group, _long_subtask)
        if low <= task.num_commands <= high:
            return task


TEST_HEAD = """#!/bin/bash
# canary {canary}
# Writes one reward and a CTRF report. Each check is a condition on the final state of {workdir}.
out=/logs/verifier; mkdir -p "$out"; tests=; passed=0; total=0
cd {workdir} 2>/dev/null || gone=1
check() {{
  local status=failed; total=$((total + 1))
  if [[ -z $gone ]] && eval "$2" >/dev/null 2>&1; then status=passed; passed=$((passed + 1)); fi
  tests+="${{tests:+,}}{{\\"name\\":\\"$1\\",\\"status\\":\\"$status\\",\\"duration\\":0}}"
}}
"""
TEST_TAIL = """summary=$(printf '"tests":%d,"passed":%d,"failed":%d' $total $passed $((total - passed)))
summary+=',"skipped":0,"pending":0,"other":0,"start":0,"stop":0'
printf '{"results":{"tool":{"name":"bash"},"summary":{%s},"tests":[%s]}}' "$summary" "$tests" > "$out/ctrf.json"
if [ $passed = $total ]; then echo 1 > "$out/reward.txt"; else echo 0 > "$out/reward.txt"; fi
"""


def task_files(task: Composite, name: str, rng: random.Random, workdir: str = "/app") -> dict[str, str]:
    """The text of every file of a Harbor task folder, by relative path."""
    canaries = [f"{rng.getrandbits(128):032x}" for _ in range(2)]
    checks = [(f"{n}.{s.family}.{c.name}", c.test) for n, s in enumerate(task.subtasks, 1) for c in s.checks]
    lines = [f"check {name} {_quote(test)}" for name, test in checks]
    toml = [
        'schema_version = "1.4"',
        "",
        "[task]",
        f'name = "megatron-rsi/{name}"',
        'version = "1.0"',
        "",
        "[metadata]",
        f"families = {json.dumps([s.family for s in task.subtasks])}",
        f"num_subtasks = {len(task.subtasks)}",
        f"num_commands = {task.num_commands}",
        f"baseline_fraction = {task.baseline:.6f}",
        f"max_turns = {4 + 2 * task.num_commands}",
        "",
        "[agent]",
        "timeout_sec = 120.0",
        'network_mode = "no-network"',
        "",
        "[verifier]",
        "timeout_sec = 30.0",
        "",
        "[environment]",
        'network_mode = "no-network"',
        "memory_mb = 256",
        f'workdir = "{workdir}"',
        "",
    ]
    files = {
        "instruction.md": task.instruction + "\n",
        "task.toml": "\n".join(toml),
        "environment/Dockerfile": f"FROM megatron-rsi-base:latest\nWORKDIR {workdir}\nCOPY files/ {workdir}/\n",
        "tests/test.sh": TEST_HEAD.format(canary=canaries[0], workdir=workdir)
        + "\n".join(lines)
        + "\n"
        + TEST_TAIL,
        "solution/solve.sh": f"#!/bin/bash\n# canary {canaries[1]}\ncd {workdir} || exit 1\n"
        + "\n".join(c for s in task.subtasks for c in s.commands)
        + "\n",
    }
    for folder in ("", *task.folders):
        files[f"environment/files/{folder}/.keep".replace("//", "/")] = ""
    return files | {f"environment/files/{path}": text for path, text in task.files.items()}


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def write_suite(folder: Path, tasks: list[Composite], prefix: str, rng: random.Random) -> None:
    """Writes a suite beside its final place and renames it, so a suite that exists is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for number, task in enumerate(tasks):
        name = f"{prefix}-{number:04d}"
        for path, text in task_files(task, name, rng).items():
            target = partial / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    # The families are checked by this project's tests, so their tasks need no `tasks check` of the user.
    write_checked(partial, {folder_hash(task): "" for task in load_suite(partial)})
    partial.rename(folder)


def generate_suites(folder: Path | str, seed: int, sizes: SuiteSizes) -> dict[str, Path]:
    """Writes every suite under ``folder`` and returns suite name -> folder. Suites already there are kept.

    ValueError when one of these has another size.

    The held-out suites do not depend on ``seed``: every run of the same sizes is measured on the same tasks.
    """
    folder = Path(folder)
    rungs = {f"ladder_{n}": n for n in sizes.ladder_rungs}
    plan: dict[str, tuple[str, int, Callable[[random.Random, int, str], Composite]]] = {
        "train": ("train", sizes.num_train, lambda rng, i, g: _train_task(rng, g)),
        "validation": ("validation", sizes.num_validation, lambda rng, i, g: compose(rng, rng.choice((1, 2, 3)), g)),
        "core": ("heldout", sizes.num_core, lambda rng, i, g: compose(rng, 1 + i % 3, g)),
        **{name: ("heldout", sizes.num_ladder, lambda rng, i, g, n=n: compose(rng, n, g)) for name, n in rungs.items()},  # type: ignore[misc]
        "long": (
            "heldout",
            sizes.num_long,
            lambda rng, i, g: compose_long(rng, g, *((20, 26) if 2 * i >= sizes.num_long else (12, 19))),
        ),
    }
    paths = {}
    for name, (group, number, make) in plan.items():
        if number == 0:
            continue
        paths[name] = folder / name
        if paths[name].exists():
            _require_size(paths[name], number)
        else:
            rng = random.Random(f"{name}:{seed if group != 'heldout' else 'heldout'}")
            write_suite(paths[name], [make(rng, i, group) for i in range(number)], name.replace("_", "-"), rng)
    return paths


def _require_size(suite: Path, number: int) -> None:
    found = sum(1 for _ in suite.glob("*/task.toml"))
    if found != number:
        raise ValueError(
            f"{suite} exists with {found} tasks, but the configuration says {number}; "
            "choose another folder, remove this one, or set the size that it has"
        )


def _train_task(rng: random.Random, group: str) -> Composite:
    """Half of them short, half with four to nine sub-tasks, some of those as long as the long suite."""
    size = rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 7, MAX_SUBTASKS))
    return compose_long(rng, group, 12, 26) if size == MAX_SUBTASKS else compose(rng, size, group)
