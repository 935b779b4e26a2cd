"""The loop: Base -> RSR-1 -> RPR-1 -> RSR-2 -> RPR-2, with a gate and a report after every stage.

    torchrun --standalone --nproc-per-node 2 -m megatron_rsi train --preset tiny

Everything that was paid for is a file of the run folder, so the same command goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import fcntl
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from . import gate as adoption
from .config import save_provenance, write_atomic
from .log import Log
from .parallel import World
from .phases import rpr, rsr
from .results import Results, StageResult, SuiteResult
from .rollout.collect import Attempt
from .rollout.records import Task, Trajectory
from .rollout.store import Store
from .rollout.tasks import load_suite
from .run import Run
from .settings import Config


def train(config: Config, argv: Sequence[str], again_from: str | None = None) -> None:
    """Runs or resumes the whole loop and writes results.json, the pictures and report.html.

    ``again_from`` names a stage (rsr-1, rpr-1, ...) to do once more, with all that follow; what there was is set aside.
    """
    signal.signal(signal.SIGTERM, _stop)
    run = open_run(config, argv, again_from)
    try:
        measure_base(run)
        for cycle in range(config.cycles):
            for phase in ("rsr", "rpr"):
                run_stage(run, cycle, phase)
                adopt_or_roll_back(run, cycle, phase)
        finish(run)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers send it after Ctrl-C: the sandboxes are closed first
        run.close()


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def open_run(config: Config, argv: Sequence[str], again_from: str | None = None) -> Run:
    world = World.init(
        config.world.tp, config.world.pp, config.world.device, threads=config.world.threads, seed=config.seed
    )
    folder = Path(config.run_dir)
    owner = None
    if world.is_main:
        owner = lock(folder)
        save_provenance(folder, config, argv)
        if again_from is not None:
            set_aside(folder, config, again_from)
    world.barrier()
    log = Log(folder, world.rank)
    with log.stage("setup"):
        run = Run(config, world, log, folder)
    run.owner = owner
    return run


def lock(folder: Path) -> IO[str]:
    """Held until this process ends. ValueError when another run works in the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process is training in {folder}: wait for it, end it, or choose another --dir") from None
    return file


# ---- stages
def stages_of(config: Config) -> list[tuple[int, str]]:
    return [(cycle, phase) for cycle in range(config.cycles) for phase in ("rsr", "rpr")]


def set_aside(folder: Path, config: Config, first: str) -> None:
    """Moves a stage and all later ones, with their measurements, to ``superseded/``. Nothing is deleted."""
    names = [stage_name(cycle, phase) for cycle, phase in stages_of(config)]
    if first not in names:
        raise ValueError(f"unknown stage {first!r}, expected one of {', '.join(names)}")
    target = folder / "superseded" / time.strftime("%Y%m%d-%H%M%S")
    for cycle, phase in stages_of(config)[names.index(first) :]:
        for path in (folder / f"cycle_{cycle:02d}" / phase, folder / "eval" / stage_name(cycle, phase)):
            if path.exists():
                (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
                path.rename(target / path.relative_to(folder))


def stage_folder(run: Run, cycle: int, phase: str) -> Path:
    return run.folder / f"cycle_{cycle:02d}" / phase


def stage_name(cycle: int, phase: str) -> str:
    return f"{phase}-{cycle + 1}"


def standing(run: Run, cycle: int, phase: str) -> tuple[str, Path, Path | None]:
    """What stands before this stage: its name, its actor, and the last adopted critic."""
    name, actor, critic = "base", run.base, None
    for c, p in stages_of(run.config):
        if (c, p) == (cycle, phase):
            break
        folder = stage_folder(run, c, p)
        if adoption.load(folder / "gate.json").adopted:
            name, actor = stage_name(c, p), folder / "actor"
            critic = folder / "critic" if p == "rpr" else critic
    return name, actor, critic


def run_stage(run: Run, cycle: int, phase: str) -> None:
    folder = stage_folder(run, cycle, phase)
    if (folder / "actor").exists():
        return
    _, parent, critic = standing(run, cycle, phase)
    began = time.time()
    with run.log.stage(stage_name(cycle, phase)):
        if phase == "rsr":
            rsr.run(run, cycle, parent, folder)
        else:
            rpr.run(run, cycle, parent, folder, critic)
    if run.world.is_main:
        write_atomic(folder / "wall_s", f"{time.time() - began:.1f}\n")
    run.world.barrier()


def adopt_or_roll_back(run: Run, cycle: int, phase: str) -> None:
    """Measures the stage, then decides on the validation tasks alone. The decision is a file."""
    folder, name = stage_folder(run, cycle, phase), stage_name(cycle, phase)
    attempts = measure(run, name, folder / "actor")
    path = folder / "gate.json"
    if run.world.is_main and not path.exists():
        parent, _, _ = standing(run, cycle, phase)
        before = rates(read_measured(run, parent, "validation"))
        after = rates([t for t in attempts if suite_of(t) == "validation"])
        common = before.keys() & after.keys()
        decision = adoption.decide(
            {k: before[k] for k in common}, {k: after[k] for k in common}, run.config.gate.alpha / run.config.num_stages,
            min_tasks=run.config.gate.min_tasks, stage=name,
        )  # fmt: skip
        adoption.save(decision, path)
    run.world.barrier()
    run.log.info(f"{name}: {adoption.load(path).reason}")
    write_results(run)


# ---- measuring
def measure_base(run: Run) -> None:
    measure(run, "base", run.base)
    write_results(run)


def evaluation_attempts(run: Run, stage: str) -> list[Attempt]:
    """Validation tasks for the gate and the held-out suites for the report, longest first to keep the engine full."""
    samples = {name: run.config.eval.samples for name in run.suites if name != "train"}
    if "validation" in samples:
        samples["validation"] = run.config.gate.samples
    attempts = [
        Attempt(
            f"eval.{stage}/{suite}/{task.task_id}/{k}",
            task,
            run.config.rollout.harnesses[0],
            run.config.eval.temperature,
        )
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
        strict=solved / n, ci95=adoption.wilson(solved, n), n=n, partial=sum(t.verdict.fraction for t in graded) / n,
        turns=sum(len(t.turns) for t in graded) / n, tokens=sum(t.num_action_tokens for t in graded) / n,
    )  # fmt: skip


def write_results(run: Run) -> None:
    if not run.world.is_main:
        return
    stages = [StageResult(name="base", suites=suites_of(run, "base"))]
    for cycle, phase in stages_of(run.config):
        folder, name = stage_folder(run, cycle, phase), stage_name(cycle, phase)
        if not (folder / "gate.json").exists():
            break
        wall_s = float((folder / "wall_s").read_text()) if (folder / "wall_s").exists() else None
        adopted = adoption.load(folder / "gate.json").adopted
        stages.append(StageResult(name=name, adopted=adopted, wall_s=wall_s, suites=suites_of(run, name)))
    results = Results(seed=run.config.seed, stages=stages)
    write_atomic(
        run.folder / "results.json", msgspec.json.format(msgspec.json.encode(results), indent=1).decode() + "\n"
    )


def suites_of(run: Run, stage: str) -> dict[str, SuiteResult]:
    found = {name: summarise(read_measured(run, stage, name)) for name in run.report_suites}
    return {name: result for name, result in found.items() if result is not None}


def finish(run: Run) -> None:
    if run.world.is_main:
        from .report import make

        made = make(run.folder, run.log.console)
        run.log.info(f"results: {run.folder / 'results.json'}\npicture: {made.success}\nreport: {made.html}")
    run.world.barrier()


# ---- single steps for the command line
def collect(config: Config, checkpoint: Path, tasks: Path, out: Path, *, harness: str, samples: int) -> None:
    """Lets a checkpoint attempt every task of a folder; trajectories are appended to ``out`` (NAME.<rank>.jsonl)."""
    run = open_rollouts(config, checkpoint, {"tasks": load_suite(tasks)}, out.parent)
    try:
        run.hot_swap(checkpoint)
        attempts = [
            Attempt(f"collect/{task.task_id}/{harness}/{k}", task, harness, config.eval.temperature)
            for task in run.suites["tasks"]
            for k in range(samples)
        ]
        found = run.collect(out.parent, out.name.removesuffix(".jsonl"), attempts, "collect")
        run.log.info(f"{sum(t.verdict.passed for t in found)} of {len(found)} attempts passed")
    finally:
        run.close()


def evaluate(config: Config, checkpoint: Path, suites: Path, out: Path | None) -> Results:
    """Measures a checkpoint on every suite below ``suites`` (or on the one suite that it is)."""
    paths = [suites] if any(suites.glob("*/task.toml")) else sorted(p for p in suites.iterdir() if p.is_dir())
    with tempfile.TemporaryDirectory(prefix="megatron-rsi-eval-") as scratch:
        run = open_rollouts(config, checkpoint, {p.name: load_suite(p) for p in paths}, out or Path(scratch))
        try:
            measure(run, "checkpoint", checkpoint)
            found = {name: summarise(read_measured(run, "checkpoint", name)) for name in run.suites}
            results = {name: result for name, result in found.items() if result is not None}
            return Results(seed=config.seed, stages=[StageResult(name=str(checkpoint), suites=results)])
        finally:
            run.close()


def open_rollouts(config: Config, checkpoint: Path, suites: dict[str, list[Task]], folder: Path) -> Run:
    """A run that only rolls out: no training tasks, no provenance."""
    config = dataclasses.replace(config, base=str(checkpoint))
    world = World.init(1, 1, config.world.device, threads=config.world.threads, seed=config.seed)
    return Run(config, world, Log(None, world.rank), folder, suites)
