"""Shows a JSONL file of a run in the terminal: trajectories turn by turn, runbooks, reviews."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from .rollout.records import Review, Runbook, Trajectory
from .rollout.store import store_files

Record = Trajectory | Runbook | Review


def read(path: Path | str) -> Iterator[Record]:
    """The records of a JSONL file; the kind is told by its fields. A torn last line is left out.

    ``rollouts.jsonl`` stands for the files of all processes, ``rollouts.0.jsonl`` and so on.

    Raises ValueError with the line number for a line that is none of the three.
    """
    given = Path(path)
    files = [given] if given.is_file() else store_files(given.parent, given.name.removesuffix(".jsonl"))
    if not files:
        example = "runs/tiny/cycle_00/rsr/rollouts.jsonl"
        raise ValueError(f"no file {given}: give a JSONL file of a run, for example {example}")
    for file in files:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n") and line.strip():
                    yield _decode(line, f"{file}, line {number}")


def _decode(line: bytes, place: str) -> Record:
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
        kind: type[Record] = Trajectory if "attempt_id" in fields else Runbook if "text" in fields else Review
        return msgspec.convert(fields, kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{place}: neither a trajectory, a runbook nor a review ({error})") from None


def solved(record: Record) -> bool:
    """Passed or accepted; a runbook always is."""
    if isinstance(record, Trajectory):
        return record.verdict.passed
    return record.accepted if isinstance(record, Review) else True


def task_of(record: Record) -> str:
    return record.runbook_id if isinstance(record, Review) else record.task_id


def show(record: Record, console: Console) -> None:
    """Prints one record."""
    if isinstance(record, Trajectory):
        _show_trajectory(record, console)
    elif isinstance(record, Runbook):
        console.print(Text(f"runbook {record.runbook_id}  task {record.task_id}  depth {record.depth}", style="bold"))
        console.print(Padding(Text(record.text), (0, 0, 1, 2)))
    else:
        verdict = Text("accepted", style="green") if record.accepted else Text("rejected", style="red")
        reasons = f": {'; '.join(record.reasons)}" if record.reasons else ""
        name = (f"review {record.runbook_id}  ", "bold")
        console.print(Text.assemble(name, verdict, f" by {record.source}{reasons}"))


def _show_trajectory(trial: Trajectory, console: Console) -> None:
    title = f"{trial.attempt_id}  task {trial.task_id}  {trial.harness}  T {trial.temperature:g}  {trial.wall_s:.1f}s"
    console.print(Text(title, style="bold"))
    if trial.guidance:
        console.print(Padding(Text(f"guidance: {trial.guidance}", style="magenta"), (0, 0, 0, 2)))
    for number, turn in enumerate(trial.turns):
        failed = turn.exit_code not in (None, 0)
        status = f"  exit {turn.exit_code}" if failed else ""
        count = f"  ({len(turn.completion.ids)} tokens, weights {turn.completion.weight_version})"
        console.print(Text.assemble(f"  {number:>2} ", ("$ " + turn.command, "cyan"), (status, "red"), (count, "dim")))
        if turn.observation:
            console.print(Padding(Text(turn.observation.rstrip("\n"), style="dim"), (0, 0, 0, 7)))
    console.print(_verdict(trial))


def _verdict(trial: Trajectory) -> Text:
    verdict = trial.verdict
    if verdict.error is not None:
        line = Text(f"  no verdict: {verdict.error.value} {verdict.message}".rstrip(), style="yellow")
    else:
        word, colour = ("solved", "green") if verdict.passed else ("not solved", "red")
        passed = sum(check.passed for check in verdict.checks)
        line = Text.assemble("  ", (word, colour), f"  checks {passed}/{len(verdict.checks)} ({verdict.fraction:.2f})")
    if trial.stop_reason is not None:
        line.append(f"  stopped: {trial.stop_reason.value}", style="yellow")
    failed = [check.name for check in verdict.checks if not check.passed]
    if failed:
        line.append(f"  failed: {', '.join(failed)}")
    if verdict.integrity:
        line.append(f"  INTEGRITY: {', '.join(verdict.integrity)}", style="bold red")
    return line.append("\n")
