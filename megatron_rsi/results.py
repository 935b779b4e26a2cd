"""results.json: what every stage scored on the held-out suites. Read here, checked here.

    {"seed": 0, "stages": [{"name": "base", "adopted": true, "wall_s": 160.0, "suites": {
        "core": {"strict": 0.27, "ci95": [0.22, 0.33], "partial": 0.55, "n": 256, "turns": 4.1, "tokens": 61.0},
        "ladder_4": ..., "long": ...}}]}

A stage with ``adopted`` false was measured and rolled back: the next one starts from the stage before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from .config import write_atomic


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """``strict``: share of ``n`` attempts that passed every check; ``partial``: mean fraction of checks passed.

    ``turns`` and ``tokens`` (sampled) are means an attempt; None when they were not measured.
    """

    strict: float
    ci95: tuple[float, float]
    n: int
    partial: float | None = None
    turns: float | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        low, high = self.ci95
        if not 0.0 <= low <= self.strict <= high <= 1.0:
            raise ValueError(f"expected 0 <= low <= strict <= high <= 1, got strict {self.strict} and ci95 {self.ci95}")


class StageResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    suites: dict[str, SuiteResult]
    adopted: bool = True
    wall_s: float | None = None


class Results(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    stages: list[StageResult]

    @property
    def suites(self) -> list[str]:
        """Suite names: core, the ladder by rung, long, then the rest."""
        return sort_suites({name for stage in self.stages for name in stage.suites})

    def standing(self) -> list[StageResult]:
        """For each stage the result of the model that stands after it: its own, or the last adopted one before it."""
        out: list[StageResult] = []
        for stage in self.stages:
            out.append(stage if stage.adopted or not out else out[-1])
        return out


def sort_suites(names: set[str]) -> list[str]:
    def key(name: str) -> tuple[int, int, str]:
        rung = name.removeprefix("ladder_")
        if name.startswith("ladder_") and rung.isdigit():
            return 1, int(rung), name
        return {"core": 0, "long": 2}.get(name, 3), 0, name

    return sorted(names, key=key)


def read_results(run_dir: Path | str) -> Results:
    """Raises ValueError saying what is missing or malformed in ``run_dir``/results.json."""
    path = Path(run_dir) / "results.json"
    if not Path(run_dir).is_dir():
        raise ValueError(f"no run folder {run_dir}")
    if not path.is_file():
        raise ValueError(f"{path} is missing: the run has not finished its first evaluation")
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is malformed: {error}") from None
    if not results.stages:
        raise ValueError(f"{path} holds no stage yet")
    return results


def save_results(results: Results, folder: Path | str) -> None:
    """Writes results.json, whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(results), indent=1).decode()
    write_atomic(Path(folder) / "results.json", text + "\n")


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for one value)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
