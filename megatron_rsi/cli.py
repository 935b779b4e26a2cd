"""The command line: ``python -m megatron_rsi COMMAND`` or ``megatron-rsi COMMAND``; ``--help`` after any command.

Configuration is a preset and overrides, in any command that takes one:

    torchrun --standalone --nproc-per-node 2 -m megatron_rsi train --preset tiny --seed 3 rpr.updates=4

A mistake of the user ends with one line on stderr and exit code 2, an interrupt with 130.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro
from tyro.extras import subcommand_cli_from_dict

from .config import Config, load
from .rollout.errors import EngineError
from .sandbox.base import SandboxError

Overrides = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="KEY=VALUE")]
Folders = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
PathArgument = Annotated[str, tyro.conf.Positional]

MALLOC = {  # large tensors are kept and reused instead of returned to the kernel: 1.3-1.5 times the training speed on CPU
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_MMAP_THRESHOLD_": "100000000000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def _config(preset: str, run: str | None, seed: int | None, base: str | None, overrides: Sequence[str]) -> Config:
    named = {"run_dir": run, "seed": seed, "base": base}
    return load(preset, [*overrides, *(f"{key}={value}" for key, value in named.items() if value is not None)])


def _check_checkpoint(path: str) -> None:
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"no checkpoint in {path}: a folder with config.json and model.safetensors is expected")


def train(
    preset: str = "tiny",
    dir: str | None = None,
    seed: int | None = None,
    base: str | None = None,
    nproc: int = 1,
    again_from: str | None = None,
    overrides: Overrides = (),
) -> None:
    """Run the whole loop, or resume it: the same command on the same run folder goes on where it stopped.

    Args:
        preset: TOML file, or name of a preset in scripts/presets.
        dir: Run folder (run_dir).
        seed: Seed of the run.
        base: Hugging Face Qwen3 checkpoint to start from; without it the preset's tiny base is made.
        again_from: Stage to do once more with all later ones, for example rpr-1; the old ones go to superseded/.
        nproc: Processes on this machine; as torchrun --standalone --nproc-per-node, without its stack trace.
        overrides: Dotted overrides of the configuration, key=value, for example rpr.updates=4.
    """
    config = _config(preset, dir, seed, base, overrides)
    if nproc > 1 and "RANK" not in os.environ:
        if Path(config.run_dir).is_file():
            raise ValueError(f"run folder {config.run_dir} is a file: choose another with --dir")
        _launch(nproc, Path(config.run_dir) / "logs")
        return
    from .train import train as run_loop

    run_loop(config, sys.argv, again_from)


def _launch(nproc: int, logs: Path) -> None:
    """Runs this command line in ``nproc`` processes; SystemExit with the code of the first that failed."""
    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failed process has said why
    for name, value in MALLOC.items() | {("OMP_NUM_THREADS", "1")}:
        os.environ.setdefault(name, value)
    layout = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id="train", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
    )  # fmt: skip
    try:
        elastic_launch(layout, sys.executable)("-m", "megatron_rsi", *sys.argv[1:])
    except SignalException as stop:  # Ctrl-C or a scheduler's SIGTERM; the first rank has said how to go on
        raise SystemExit(128 + stop.sigval) from None
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code < 0:  # by a signal: nobody has said anything
            print(f"error: a training process ended by signal {-code}", file=sys.stderr)
        raise SystemExit(code if code > 0 else 128 - code) from None


def collect(
    checkpoint: str,
    tasks: str,
    out: str,
    preset: str = "tiny",
    harness: str | None = None,
    samples: int = 1,
    seed: int | None = None,
    overrides: Overrides = (),
) -> None:
    """Let a checkpoint attempt a folder of tasks and write the trajectories to a JSONL file.

    Args:
        checkpoint: Folder of the model in Hugging Face format.
        tasks: Folder with Harbor task folders.
        out: JSONL file to append to; what it already holds of this checkpoint, tasks and settings is not run again.
        preset: TOML file, or name of a preset in scripts/presets.
        harness: Harness of the attempts (default: the first of rollout.harnesses).
        samples: Attempts a task.
        seed: Seed of the sampling.
        overrides: Dotted overrides of the configuration, key=value.
    """
    config = _config(preset, None, seed, None, overrides)
    _check_checkpoint(checkpoint)
    from .evaluation import collect as run_collect

    harness = harness or config.rollout.harnesses[0]
    run_collect(config, Path(checkpoint), Path(tasks), Path(out), harness=harness, samples=samples)


def evaluate(
    checkpoint: str,
    suites: str,
    out: str | None = None,
    preset: str = "tiny",
    seed: int | None = None,
    overrides: Overrides = (),
) -> None:
    """Measure a checkpoint on suites of tasks and print strict success with its 95 % interval.

    Args:
        checkpoint: Folder of the model in Hugging Face format.
        suites: Folder whose sub-folders are suites (core, ladder_4, ..., long), or one suite.
        out: Folder for attempts.jsonl and results.json; without it only the table is printed.
        preset: TOML file, or name of a preset in scripts/presets.
        seed: Seed of the sampling.
        overrides: Dotted overrides of the configuration, key=value.
    """
    config = _config(preset, None, seed, None, overrides)
    _check_checkpoint(checkpoint)
    from .evaluation import evaluate as run_evaluate
    from .report import suite_grid

    _console().print(suite_grid(run_evaluate(config, Path(checkpoint), Path(suites), Path(out) if out else None)).rich())


def tasks_generate(
    folder: PathArgument, preset: str = "tiny", seed: int | None = None, overrides: Overrides = ()
) -> None:
    """Write the training, validation and held-out task folders of a preset.

    Args:
        folder: Where to write; each suite becomes a sub-folder.
        preset: TOML file, or name of a preset in scripts/presets.
        seed: Seed of the training and validation tasks.
        overrides: Dotted overrides of the configuration, key=value.
    """
    config = _config(preset, None, seed, None, overrides)
    from megatron_rsi.rollout import taskgen

    for name, path in taskgen.generate_suites(Path(folder), config.seed, config.tasks).items():
        print(f"{name:<12} {sum(1 for entry in path.iterdir() if entry.is_dir()):>5} tasks in {path}")


def tasks_check(
    folder: PathArgument, sandbox: str = "bubblewrap", jobs: int = 2, json: str | None = None
) -> None:
    """Check every task under a folder: its reference must pass; doing nothing, and writing the reward oneself, must fail.

    The verdicts go to checked.json in the folder; training admits only tasks that were found good as they are.

    Args:
        json: File for all results, with the content hash of each task.
        folder: Task folder, suite, or folder of suites.
        sandbox: bubblewrap or docker.
        jobs: Tasks checked at a time.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"no folder {folder}")
    from megatron_rsi.rollout import taskcheck

    rows = taskcheck.check(Path(folder), sandbox, jobs)
    if json is not None:
        Path(json).write_text(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode() + "\n")
    bad = [row for row in rows if not row.ok]
    for row in bad:
        print(f"{row.task_id}: {row.message}")
    print(f"{len(rows) - len(bad)} of {len(rows)} tasks are good")
    if not rows:
        raise ValueError(f"no task folders under {folder}: a task has instruction.md and task.toml")
    if bad:
        raise SystemExit(1)


def tasks_overlap(folder: PathArgument, other: PathArgument, limit: int = 20) -> None:
    """Compare two suites: tasks that are equal, and how much of each instruction of the first is in the second.

    Args:
        folder: Suite whose tasks should be new.
        other: Suite that is known, such as the training tasks.
        limit: Pairs to show, the most alike first; 0 shows all.
    """
    from megatron_rsi.rollout import hygiene
    from megatron_rsi.rollout.tasks import content_hash, load_suite

    tasks, others = load_suite(folder), load_suite(other)
    known = {content_hash(task): task.task_id for task in others}
    equal = [(task.task_id, known[content_hash(task)]) for task in tasks if content_hash(task) in known]
    pairs = hygiene.overlaps(tasks, others)
    for task_id, twin in equal:
        print(f"equal {task_id} {twin}")
    for pair in pairs[: limit or None]:
        print(f"{pair.containment:5.3f} {pair.task_id} {pair.other_id}")
    too_alike = sum(pair.containment >= hygiene.MAX_CONTAINMENT for pair in pairs)
    print(f"{len(equal)} equal, {too_alike} of {len(pairs)} pairs with a common run of {hygiene.NGRAM} words too much alike")
    if equal or too_alike:
        raise SystemExit(1)


def tasks_split(
    folder: PathArgument, out: PathArgument, train: float = 0.8, validation: float = 0.1, heldout: float = 0.1
) -> None:
    """Copy the tasks of a folder into OUT/train, OUT/validation and OUT/heldout, by the hash of their content.

    Args:
        folder: Folder of task folders.
        out: Folder to make.
        train: Share of the training tasks.
        validation: Share of the validation tasks.
        heldout: Share of the held-out tasks.
    """
    import shutil

    from megatron_rsi.rollout import hygiene
    from megatron_rsi.rollout.tasks import load_suite

    if Path(out).exists():
        raise ValueError(f"{out} exists: name a folder that does not")
    shares = {"train": train, "validation": validation, "heldout": heldout}
    for name, tasks in hygiene.split(load_suite(folder), shares).items():
        (Path(out) / name).mkdir(parents=True)
        for task in tasks:
            shutil.copytree(task.path, Path(out) / name / task.task_id)
        print(f"{name:<12} {len(tasks):>5} tasks in {Path(out) / name}")


def view(file: PathArgument, task: str | None = None, only: str = "all", limit: int = 10, skip: int = 0) -> None:
    """Show trajectories, runbooks or reviews of a JSONL file.

    Args:
        file: JSONL file of a run, for example runs/tiny/cycle_00/rsr/rollouts.jsonl.
        task: Only records whose task id contains this.
        only: all, solved or failed.
        limit: Records to show; 0 shows all.
        skip: Records to pass over first.
    """
    if only not in ("all", "solved", "failed"):
        raise ValueError(f"--only is {only!r}, expected all, solved or failed")
    from . import view as viewer

    console, shown, matched = _console(), 0, 0
    for record in viewer.read(file):
        wanted = only == "all" or viewer.solved(record) == (only == "solved")
        if not wanted or (task is not None and task not in viewer.task_of(record)):
            continue
        matched += 1
        if matched > skip and (limit == 0 or shown < limit):
            viewer.show(record, console)
            shown += 1
    console.print(f"{shown} of {matched} records shown")


def report(run_dirs: Folders, seeds_picture: str | None = None) -> None:
    """Make the table, the pictures and report.html of a run; with several runs also the table over seeds.

    Args:
        run_dirs: Run folders.
        seeds_picture: Where the picture over seeds goes (default: seeds.png beside the first run folder).
    """
    if not run_dirs:
        raise ValueError("no run folder given, for example: report runs/tiny")
    from . import report as reporter

    for folder in run_dirs:
        made = reporter.make(folder, _console())
        print(f"report: {made.html}" + (f"  picture: {made.success}" if made.success else ""))
    if len(run_dirs) > 1:
        picture = Path(seeds_picture) if seeds_picture else Path(run_dirs[0]).resolve().parent / "seeds.png"
        print("\n" + reporter.aggregate(run_dirs, picture) + f"\npicture: {picture}")


def plan(
    preset: str = "tiny",
    dir: str | None = None,
    seed: int | None = None,
    base: str | None = None,
    bf16: bool = False,
    overrides: Overrides = (),
) -> None:
    """Check a configuration and estimate the memory that it needs, without starting anything.

    Args:
        preset: TOML file, or name of a preset in scripts/presets.
        dir: Run folder (run_dir).
        seed: Seed of the run.
        base: Hugging Face Qwen3 checkpoint; its config.json gives the shape.
        bf16: Count for bf16 with fp32 master weights, as on a GPU.
        overrides: Dotted overrides of the configuration, key=value.
    """
    config = _config(preset, dir, seed, base, overrides)
    from .plan import format_bytes
    from .plan import plan as rows

    print(f"{'run folder':<16} {config.run_dir}")
    for name, size, how in rows(config, bf16):
        print(f"{name:<16} {format_bytes(size):>10}   {how}")


def doctor(parity: str | None = None, preset: str = "tiny", overrides: Overrides = ()) -> None:
    """Say what a run on this machine can use, what is missing and how to get it. Exit code 1 when no run would work.

    Args:
        parity: Checkpoint to compare trainer and engine on instead: log-probs of the same tokens, after a swap of weights.
        preset: TOML file, or name of a preset in scripts/presets; for --parity.
        overrides: Dotted overrides of the configuration, for example engine.kind=sglang world.tp=2; for --parity.
    """
    from rich.text import Text

    if parity is not None:
        _check_checkpoint(parity)
        from .parity import parity as compare

        findings = [compare(_config(preset, None, None, parity, overrides), Path(parity))]
        if os.environ.get("RANK", "0") != "0":
            return
    else:
        from .doctor import examine

        findings = examine()
    console = _console()
    styles = {"ok": "green", "optional": "yellow", "problem": "bold red"}
    for finding in findings:
        state = (f"{finding.state:<9}", styles[finding.state])
        console.print(Text.assemble(state, f"{finding.name:<18} {finding.detail}"))
    if any(finding.state == "problem" for finding in findings):
        raise SystemExit(1)


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "collect": collect,
    "eval": evaluate,
    "view": view,
    "report": report,
    "plan": plan,
    "doctor": doctor,
    "tasks-generate": tasks_generate,  # also written `tasks generate`
    "tasks-check": tasks_check,
    "tasks-overlap": tasks_overlap,
    "tasks-split": tasks_split,
}


def arrange(arguments: Sequence[str]) -> list[str]:
    """Moves overrides behind the options, so that they may stand anywhere, and joins `tasks check` to one command.

    >>> arrange(["train", "rpr.lr=1e-4", "--seed", "3", "cycles=1"])
    ['train', '--seed', '3', 'rpr.lr=1e-4', 'cycles=1']
    """
    rest = list(arguments)
    if rest[:1] == ["tasks"] and len(rest) > 1 and f"tasks-{rest[1]}" in COMMANDS:
        rest[:2] = [f"tasks-{rest[1]}"]
    takes_value = [False] + [before.startswith("--") and "=" not in before for before in rest[:-1]]
    moved = [re.match(r"[a-z_][\w.]*=", a) is not None and not v for a, v in zip(rest, takes_value, strict=True)]
    options = [a for a, m in zip(rest, moved, strict=True) if not m]
    return options + [a for a, m in zip(rest, moved, strict=True) if m]


def _fail(message: str) -> int:
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(2)  # a mistake that all ranks find is told once: rank 0 has ended the job by then
    print(f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}", file=sys.stderr, flush=True)
    return 2


def _dispatch(arguments: Sequence[str]) -> None:
    summary = (__doc__ or "").splitlines()[0]
    subcommand_cli_from_dict(COMMANDS, prog="megatron-rsi", description=summary, args=arrange(arguments))


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code. Only errors that a user can act on are caught.

    MEGATRON_RSI_TRACEBACK=1 lets them through, to see where they come from.
    """
    if os.environ.get("MEGATRON_RSI_TRACEBACK") == "1":
        _dispatch(arguments)
        return 0
    try:
        _dispatch(arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of a pipe, such as head, went away
    except ValueError as error:
        return _fail(str(error))
    except SandboxError as error:
        return _fail(f"sandbox: {error}")
    except EngineError as error:
        return _fail(f"policy engine: {error}")
    except ModuleNotFoundError as error:
        return _fail(f"the Python package {error.name!r} is not installed; `megatron-rsi doctor` says what needs it")
    except OSError as error:  # a full disk, no permission, a path that is too long or not a folder
        what = f"{error.strerror}: {error.filename or 'the run folder'}" if error.errno else str(error)
        return _fail(f"{what}; what was finished before is kept")
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\ninterrupted; the same command goes on where this one stopped", file=sys.stderr)
        return 130
    return 0


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
