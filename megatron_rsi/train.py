"""The loop: Base -> RSR-1 -> RPR-1 -> RSR-2 -> RPR-2, with a gate and a report after every stage.

    torchrun --standalone --nproc-per-node 2 -m megatron_rsi train --preset tiny

Everything that was paid for is a file of the run folder, so the same command goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from . import gate as adoption
from .config import save_provenance, write_atomic
from .evaluation import measure, rates, read_measured, suite_of, summarise
from .log import Log, set_aside_metrics, wall_seconds
from .parallel import World
from .phases import rpr, rsr
from .results import Results, StageResult, SuiteResult, save_results
from .run import Run
from .settings import Config


def train(config: Config, argv: Sequence[str], again_from: str | None = None) -> None:
    """Runs or resumes the whole loop and writes results.json, the pictures and report.html.

    ``again_from`` names a stage (rsr-1, rpr-1, ...) to do once more, with all that follow; what there was is set aside.
    The same command resumes such a run too: only after it has finished does it set aside once more.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
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
    signal.raise_signal(signal.SIGINT)  # an event loop ends its tasks on that one, with nothing left over


def open_run(config: Config, argv: Sequence[str], again_from: str | None = None) -> Run:
    world = World.init(
        config.world.tp, config.world.pp, config.world.device, threads=config.world.threads, seed=config.seed,
        timeout_s=config.world.timeout_s,
    )  # fmt: skip
    folder = Path(config.run_dir)
    owner = None
    if world.is_main:
        owner = lock(folder)
        save_provenance(folder, config, argv)
        if again_from is not None:
            set_aside(folder, config, again_from)
        elif (folder / AGAIN).exists():
            raise ValueError(
                f"{folder} is being done again from {(folder / AGAIN).read_text().strip()}: repeat that option to go on"
            )
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
AGAIN = "again_from"  # file of the run folder: the stage it is being done again from, until the run has finished


def stages_of(config: Config) -> list[tuple[int, str]]:
    return [(cycle, phase) for cycle in range(config.cycles) for phase in ("rsr", "rpr")]


def set_aside(folder: Path, config: Config, first: str) -> None:
    """Moves a stage and all later ones, with their measurements, to ``superseded/``. Nothing is deleted.

    Does nothing when that was done before and the run has not finished since.
    """
    names = [stage_name(cycle, phase) for cycle, phase in stages_of(config)]
    if first not in names:
        raise ValueError(f"unknown stage {first!r}, expected one of {', '.join(names)}")
    marker = folder / AGAIN
    if marker.exists():
        if (before := marker.read_text().strip()) != first:
            raise ValueError(f"{folder} is being done again from {before}: finish that first, with --again-from {before}")
        return
    target = folder / "superseded" / time.strftime("%Y%m%d-%H%M%S")
    later = stages_of(config)[names.index(first) :]
    for cycle, phase in later:
        for path in (folder / f"cycle_{cycle:02d}" / phase, folder / "eval" / stage_name(cycle, phase)):
            if path.exists():
                (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
                path.rename(target / path.relative_to(folder))
    target.mkdir(parents=True, exist_ok=True)
    set_aside_metrics(folder / "metrics.jsonl", target / "metrics.jsonl", [stage_name(*stage) for stage in later])
    write_atomic(marker, f"{first}\n")


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
    name = stage_name(cycle, phase)
    with run.log.stage(name):
        if phase == "rsr":
            rsr.run(run, name, cycle, parent, folder)
        else:
            rpr.run(run, name, cycle, parent, folder, critic)


def adopt_or_roll_back(run: Run, cycle: int, phase: str) -> None:
    """Measures the stage, then decides on the validation tasks alone. The decision is a file."""
    folder, name = stage_folder(run, cycle, phase), stage_name(cycle, phase)
    attempts = measure(run, name, folder / "actor")
    path = folder / "gate.json"
    if run.world.is_main and not path.exists():
        after = rates([t for t in attempts if suite_of(t) == "validation"])
        earlier = {s: rates(read_measured(run, s, "validation")) for s in adopted_before(run, cycle, phase)}
        gate = run.config.gate
        decision = adoption.decide_stage(
            earlier, after, gate.alpha / run.config.num_stages, min_tasks=gate.min_tasks, stage=name
        )
        adoption.save(decision, path)
    run.world.barrier()
    run.log.info(f"{name}: {adoption.load(path).reason}")
    write_results(run)


def adopted_before(run: Run, cycle: int, phase: str) -> list[str]:
    """Names of the adopted stages before this one, the base first; the last is what this stage started from."""
    before = stages_of(run.config)[: stages_of(run.config).index((cycle, phase))]
    return ["base"] + [
        stage_name(*stage) for stage in before if adoption.load(stage_folder(run, *stage) / "gate.json").adopted
    ]


def measure_base(run: Run) -> None:
    measure(run, "base", run.base)
    write_results(run)


def write_results(run: Run) -> None:
    if not run.world.is_main:
        return
    seconds = wall_seconds(run.folder / "metrics.jsonl")
    stages = [StageResult(name="base", suites=suites_of(run, "base"))]
    for cycle, phase in stages_of(run.config):
        folder, name = stage_folder(run, cycle, phase), stage_name(cycle, phase)
        if not (folder / "gate.json").exists():
            break
        adopted = adoption.load(folder / "gate.json").adopted
        stages.append(StageResult(name=name, adopted=adopted, wall_s=seconds.get(name), suites=suites_of(run, name)))
    save_results(Results(seed=run.config.seed, stages=stages), run.folder)


def suites_of(run: Run, stage: str) -> dict[str, SuiteResult]:
    found = {name: summarise(read_measured(run, stage, name)) for name in run.report_suites}
    return {name: result for name, result in found.items() if result is not None}


def finish(run: Run) -> None:
    if run.world.is_main:
        from .report import make

        made = make(run.folder, run.log.console)
        run.log.info(f"results: {run.folder / 'results.json'}\npicture: {made.success}\nreport: {made.html}")
        (run.folder / AGAIN).unlink(missing_ok=True)
    run.world.barrier()
