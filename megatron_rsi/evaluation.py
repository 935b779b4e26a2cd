"""Measuring a checkpoint on suites of tasks, inside a run and as a command of its own; rollouts without a trainer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import gate
from .log import Log
from .parallel import World
from .results import Results, StageResult, SuiteResult, save_results
from .rollout.collect import Attempt
from .rollout.harness import make_harness
from .rollout.records import Task, Trajectory
from .rollout.store import Store
from .rollout.tasks import folder_hash, load_suite
from .run import Run
from .settings import Config


# ---- inside a run
def evaluation_attempts(run: Run, stage: str) -> list[Attempt]:
    """Validation tasks for the gate and the held-out suites for the report, longest first to keep the engine full."""
    samples = {"validation": run.config.gate.samples} | dict.fromkeys(run.report_suites, run.config.eval.samples)
    attempts = [
        Attempt(f"eval.{stage}/{suite}/{task.task_id}/{k}", task, run.deployment_harness, run.config.eval.temperature)
        for suite, number in samples.items()
        for task in run.suites[suite]
        for k in range(number)
    ]
    return sorted(attempts, key=lambda a: (-a.task.max_turns, a.attempt_id))


def measure(run: Run, stage: str, actor: Path) -> list[Trajectory]:
    with run.log.stage(f"eval.{stage}"):
        attempts = evaluation_attempts(run, stage)
        run.hot_swap(actor)
        return run.collect(run.folder / "eval" / stage, "attempts", attempts, f"evaluate {stage}", part="evaluate")


def read_measured(run: Run, stage: str, suite: str) -> list[Trajectory]:
    trajectories = Store(run.folder / "eval" / stage, "attempts", Trajectory).read()
    return [t for t in trajectories if suite_of(t) == suite]


def suite_of(trajectory: Trajectory) -> str:
    return trajectory.attempt_id.split("/")[1]


def rates(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Task id -> mean strict success over attempts with a verdict; tasks without one are left out."""
    by_task: dict[str, list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.verdict.error is None:
            by_task[trajectory.task_id].append(trajectory.verdict.passed)
    return {name: sum(passed) / len(passed) for name, passed in by_task.items()}


def summarise(trajectories: Sequence[Trajectory]) -> SuiteResult | None:
    """Strict success with its 95 % interval, mean partial score, turns and sampled tokens. None without a verdict."""
    graded = [t for t in trajectories if t.verdict.error is None]
    if not graded:
        return None
    n, solved = len(graded), sum(t.verdict.passed for t in graded)
    return SuiteResult(
        strict=solved / n, ci95=gate.wilson(solved, n), n=n, partial=sum(t.verdict.fraction for t in graded) / n,
        turns=sum(len(t.turns) for t in graded) / n, tokens=sum(t.num_action_tokens for t in graded) / n,
    )  # fmt: skip


# ---- commands of their own
def collect(config: Config, checkpoint: Path, tasks: Path, out: Path, *, harness: str, samples: int) -> None:
    """Lets a checkpoint attempt every task of a folder; trajectories are appended to ``out``, a .jsonl file."""
    make_harness(harness)
    if samples < 1:
        raise ValueError(f"--samples must be 1 or more, got {samples}")
    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out} must be a .jsonl file")
    suites = {"collect": load_suite(tasks)}
    run = open_rollouts(config, checkpoint, suites, out.parent)
    try:
        found = _attempt(run, suites, dict.fromkeys(suites, samples), harness, out.parent, out.stem)
        run.log.info(f"{sum(t.verdict.passed for t in found)} of {len(found)} attempts passed; they are in {out}")
    finally:
        run.close()


def evaluate(config: Config, checkpoint: Path, suites: Path, out: Path | None) -> StageResult:
    """Measures a checkpoint on every suite below ``suites`` (or on the one suite that it is).

    With ``out``, attempts.jsonl and results.json are written there, and what it already holds of this is not run again.
    """
    if not suites.is_dir():
        raise ValueError(f"no folder {suites}")
    one = any(suites.glob("*/task.toml"))
    paths = [suites] if one else sorted(p for p in suites.iterdir() if p.is_dir())
    loaded = {p.name: load_suite(p) for p in paths}
    if not loaded:
        raise ValueError(f"{suites} holds no suites: a suite is a folder of task folders")
    with tempfile.TemporaryDirectory(prefix="megatron-rsi-eval-") as scratch:
        folder = out or Path(scratch)
        run = open_rollouts(config, checkpoint, loaded, folder)
        try:
            samples = dict.fromkeys(loaded, config.eval.samples)
            found = _attempt(run, loaded, samples, run.deployment_harness, folder, "attempts")
        finally:
            run.close()
        by_suite = {name: summarise([t for t in found if suite_of(t) == name]) for name in loaded}
        result = StageResult(name=str(checkpoint), suites={n: r for n, r in by_suite.items() if r is not None})
        if out is not None:
            save_results(Results(seed=config.seed, stages=[result]), out)
        return result


def open_rollouts(config: Config, checkpoint: Path, suites: dict[str, list[Task]], folder: Path) -> Run:
    """A run that only rolls out, in one process: no training tasks, no provenance."""
    config = dataclasses.replace(config, base=str(checkpoint))
    world = World.init(1, 1, config.world.device, threads=config.world.threads, seed=config.seed)
    run = Run(config, world, Log(None, world.rank), folder, suites)
    run.writer = None
    return run


def _attempt(
    run: Run, suites: Mapping[str, Sequence[Task]], samples: Mapping[str, int], harness: str, folder: Path, name: str
) -> list[Trajectory]:
    """Attempts under ids that end in a digest of all that decides them: another checkpoint in the same file is no mix-up."""
    identity = _identity(run)
    attempts = [
        Attempt(
            f"eval/{suite}/{task.task_id}/{harness}/{k}/{_digest(identity, folder_hash(task))[:12]}",
            task, harness, run.config.eval.temperature,
        )
        for suite, tasks in suites.items()
        for task in tasks
        for k in range(samples[suite])
    ]  # fmt: skip
    run.hot_swap(run.base)
    return run.collect(folder, name, attempts, "attempts")


def _identity(run: Run) -> str:
    """Digest of the checkpoint's files and of the settings that an attempt depends on."""
    config = run.config
    sections = [dataclasses.asdict(s) for s in (config.engine, config.sandbox, config.rollout, config.eval)]
    settings = json.dumps([config.seed, sections], sort_keys=True)
    files = [p for p in sorted(run.base.iterdir()) if p.suffix in (".json", ".safetensors")]
    return _digest(settings, *(f"{p.name} {_file_digest(p)}" for p in files))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
