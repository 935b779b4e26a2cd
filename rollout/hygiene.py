"""Keeping task sets apart and known: overlap by 13-grams, splitting by hash, canaries, and which tasks were checked."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .integrity import CANARY
from .records import Task
from .tasks import content_hash, folder_hash

NGRAM = 13  # words; the usual length for contamination checks of training sets
MIN_WORDS = 20  # a shorter instruction shares its few n-grams by chance
MAX_CONTAINMENT = 0.8
CHECKED_FILE = "checked.json"


class Overlap(NamedTuple):
    """``containment``: the share of the first task's different 13-grams that also occur in the second's instruction."""

    task_id: str
    other_id: str
    containment: float


def words(text: str) -> list[str]:
    return re.findall(r"\w+", strip_canaries(text).lower())


def ngrams(text: str) -> frozenset[tuple[str, ...]]:
    """The different runs of 13 words of a text.

    >>> len(ngrams(" ".join("abcdefghijklmno")))
    3
    """
    found = words(text)
    return frozenset(tuple(found[i : i + NGRAM]) for i in range(len(found) - NGRAM + 1))


def strip_canaries(text: str) -> str:
    """Without the lines that hold a canary: they are of no task's content.

    >>> strip_canaries("a\\n# canary 00112233445566778899aabbccddeeff\\nb\\n")
    'a\\nb\\n'
    """
    return "".join(line for line in text.splitlines(keepends=True) if not CANARY.search(line))


def overlaps(tasks: Sequence[Task], others: Sequence[Task]) -> list[Overlap]:
    """Every pair with a 13-gram in common, the most contained first. Tasks of fewer than 20 words are not compared."""
    where: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for other in others:
        for gram in ngrams(other.instruction):
            where[gram].append(other.task_id)
    found = []
    for task in tasks:
        grams = ngrams(task.instruction)
        if len(words(task.instruction)) >= MIN_WORDS:
            shared = Counter(other_id for gram in grams for other_id in where.get(gram, ()))
            found += [Overlap(task.task_id, other_id, n / len(grams)) for other_id, n in shared.items()]
    return sorted(found, key=lambda pair: (-pair.containment, pair.task_id, pair.other_id))


def require_disjoint(known: Sequence[Task], held_out: Sequence[Task], name: str, of: str = "training") -> None:
    """Raises ValueError when a task of suite ``name`` is also a task of ``known``, or all but repeats its instruction."""
    hashes = {content_hash(task): task.task_id for task in known}
    for task in held_out:
        if (twin := hashes.get(content_hash(task))) is not None:
            raise ValueError(f"task {task.task_id} of suite {name} equals {of} task {twin}; remove one of them")
    for pair in overlaps(held_out, known)[:1]:
        if pair.containment >= MAX_CONTAINMENT:
            raise ValueError(
                f"task {pair.task_id} of suite {name} repeats {100 * pair.containment:.0f} % of {of} task {pair.other_id} "
                f"(runs of {NGRAM} words; {100 * MAX_CONTAINMENT:.0f} % is too much); remove one of them"
            )


def split(tasks: Iterable[Task], shares: dict[str, float]) -> dict[str, list[Task]]:
    """Tasks by name of the part, decided by each task's content alone: equal tasks never part, later ones move none.

    ``shares`` are positive weights, in their order. ValueError otherwise.
    """
    total = sum(shares.values())
    if not shares or any(not 0 < share < float("inf") for share in shares.values()):
        raise ValueError(f"shares must be positive numbers, got {shares}")
    parts: dict[str, list[Task]] = {name: [] for name in shares}
    for task in tasks:
        point, name = int(content_hash(task)[:13], 16) / 16**13 * total, list(shares)[-1]
        for candidate, share in shares.items():
            if point < share:
                name = candidate
                break
            point -= share
        parts[name].append(task)
    return parts


# ---- admission
def write_checked(folder: Path, verdicts: Mapping[str, str]) -> None:
    """Records folder hash -> what is wrong with the task ("" when nothing is) in ``folder``/checked.json."""
    partial = folder / f".{CHECKED_FILE}.partial"
    partial.write_text(json.dumps(dict(sorted(verdicts.items())), indent=0))
    partial.replace(folder / CHECKED_FILE)


def require_checked(tasks: Sequence[Task], folder: Path) -> None:
    """Raises ValueError for a task that `tasks check` has not seen as it is now, or has found bad.

    Verdicts lie in checked.json of the task's own folder, of the suite above it or of the folder of suites above that.
    """
    verdicts: dict[Path, dict[str, str]] = {}
    remedy = f"run: python -m megatron_rsi tasks check {folder}  (tasks.require_check=false admits it as it is)"
    for task in tasks:
        digest, found = folder_hash(task), None
        for place in (Path(task.path), *list(Path(task.path).resolve().parents)[:2]):
            if place not in verdicts:
                verdicts[place] = _read_checked(place / CHECKED_FILE)
            found = verdicts[place].get(digest, found)
        if found is None:
            raise ValueError(f"task {task.task_id} of {folder} is not checked, or was changed since; {remedy}")
        if found:
            raise ValueError(f"task {task.task_id} of {folder} is bad: {found}; mend it, then {remedy}")


def _read_checked(path: Path) -> dict[str, str]:
    try:
        verdicts = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and check the tasks again") from error
    if not isinstance(verdicts, dict) or not all(isinstance(text, str) for text in verdicts.values()):
        raise ValueError(f"{path} is damaged: remove it and check the tasks again")
    return verdicts
