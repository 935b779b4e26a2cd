"""What the user sees while a run goes on, and metrics.jsonl, what is kept of it.

    log = Log("runs/tiny", rank=0)
    with log.stage("c0.rpr"):
        with log.timer("generate"):
            ...
        log.step("c0.rpr", 3, 8, {"reward": 0.41, "kl": 0.012})

On a terminal: colours and live bars. Elsewhere: plain lines. Ranks other than 0 print and write nothing.
Each line of metrics.jsonl is written whole in one call, so a kill leaves at most one torn last line, which the next
start removes. Two kinds of lines: {"kind": "step", "stage", "step", ...} and, at the end of each stage,
{"kind": "time", "stage", "wall_s", "seconds": {part: s}}.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .config import write_atomic

PARTS = ("generate", "sandbox", "train", "sync", "evaluate", "other")  # of the time report, in this order
PRINT_EVERY_S = 10.0  # of a progress bar where there is no terminal
STEP_ORDER = ("reward", "solved", "loss", "kl", "clip", "ev", "tok/s", "mfu")  # of the step line


class Timer:
    """Seconds by part. Nested parts count once: the inner part's time is not the outer's.

    >>> timer = Timer()
    >>> with timer("train"):
    ...     with timer("sync"):
    ...         pass
    >>> sorted(timer.seconds)
    ['sync', 'train']

    The stack assumes one thread of control. Where coroutines overlap (a sandbox command runs while the engine
    generates) measure there and call ``add``, or ``move`` the seconds out of the part that encloses them.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[tuple[str, float]] = []  # part, time at which it last took over

    def add(self, part: str, seconds: float) -> None:
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r} of the time report, expected one of {', '.join(PARTS)}")
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Books seconds that passed inside ``source`` under ``target``."""
        self.add(source, -seconds)
        self.add(target, seconds)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        now = time.perf_counter()
        if self._open:
            self.add(self._open[-1][0], now - self._open[-1][1])
        self.add(part, 0.0)
        self._open.append((part, now))
        try:
            yield
        finally:
            now = time.perf_counter()
            _, since = self._open.pop()
            self.add(part, now - since)
            if self._open:
                self._open[-1] = (self._open[-1][0], now)

    def snapshot(self) -> dict[str, float]:
        """Seconds up to now, the open part included."""
        seconds = dict(self.seconds)
        if self._open:
            part, since = self._open[-1]
            seconds[part] += time.perf_counter() - since
        return seconds


def since(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Seconds spent by part between two snapshots, in the order of PARTS; parts below a microsecond are left out."""
    spent = {part: now.get(part, 0.0) - before.get(part, 0.0) for part in PARTS}
    return {part: seconds for part, seconds in spent.items() if seconds > 1e-6}


def memory_bytes() -> int:
    """Peak memory: of the GPU where there is one in use, else of this process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def format_step(
    stage: str, step: int, num_steps: int, values: Mapping[str, object], seconds: Mapping[str, float]
) -> str:
    """The step line: STEP_ORDER first, then memory, then the seconds of each part.

    >>> format_step("c0.rpr", 3, 8, {"kl": 0.0123, "reward": 0.41, "mem_bytes": 2e9}, {"train": 3.25})
    'c0.rpr 3/8  reward 0.410  kl 0.0123  mem 2.0G  | train 3.2s'
    """
    cells = [f"{name} {_number(values[name])}" for name in STEP_ORDER if values.get(name) is not None]
    if "mem_bytes" in values:
        cells.append(f"mem {_float(values['mem_bytes']) / 1e9:.1f}G")
    parts = " ".join(f"{part} {seconds[part]:.1f}s" for part in PARTS if part in seconds)
    return "  ".join([f"{stage} {step}/{num_steps}", *cells]) + (f"  | {parts}" if parts else "")


def _float(value: object) -> float:
    return float(value)  # type: ignore[arg-type]  # numbers, numpy scalars and one-element tensors


def _number(value: object) -> str:
    x = _float(value)
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.3f}" if abs(x) >= 0.1 or x == 0.0 else f"{x:.3g}"


def _plain(value: object) -> object:
    """JSON value; tensors and numpy scalars become floats, NaN becomes null."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return _float(value)


class Metrics:
    """Appends to metrics.jsonl, one whole line a call. A line torn by a kill is cut off on opening."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._drop_torn_line()

    def _drop_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, size, max(0, size - (1 << 20)))  # a line is far below 1 MiB
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(self._file, size - len(tail) + tail.rfind(b"\n") + 1)

    def write(self, record: Mapping[str, object]) -> None:
        """Raises OSError when the disk is full; what was written of the line is taken back."""
        line = msgspec.json.encode(_plain(record)) + b"\n"
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, "metrics.jsonl: no space left on device")
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        os.close(self._file)


class Bar:
    """One progress bar; ``advance`` may be called from any coroutine. Off a terminal a line every ten seconds."""

    def __init__(self, log: Log, text: str, total: int, progress: Progress | None) -> None:
        self._log, self._text, self._total, self._progress = log, text, total, progress
        self._done = 0
        self._start = self._printed = time.perf_counter()
        self._task = progress.add_task(text, total=total) if progress else None

    def advance(self, count: int = 1, note: str = "") -> None:
        self.reach(self._done + count, note)

    def reach(self, done: int, note: str = "") -> None:
        count, self._done = done - self._done, done
        now = time.perf_counter()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=count, description=f"{self._text} {note}".rstrip())
        elif now - self._printed >= PRINT_EVERY_S:
            self._printed = now
            self._log.info(f"  {self._text} {self._done}/{self._total} {now - self._start:.0f}s {note}".rstrip())


class Log:
    """Console, metrics.jsonl and timer of one process. ``run_dir`` None keeps no file."""

    def __init__(self, run_dir: Path | str | None = None, rank: int = 0, console: Console | None = None) -> None:
        self.rank = rank
        self.timer = Timer()
        self.console = console or Console(highlight=False, soft_wrap=True)
        writes = run_dir is not None and rank == 0
        self._metrics = Metrics(Path(run_dir) / "metrics.jsonl") if writes and run_dir is not None else None
        self._last_step: dict[str, float] = {}
        self._progress: Progress | None = None

    def info(self, text: str) -> None:
        if self.rank == 0:
            self.console.print(text, markup=False)

    def warning(self, text: str) -> None:
        if self.rank == 0:
            self.console.print(f"warning: {text}", markup=False, style="yellow")

    def metrics(self, record: Mapping[str, object]) -> None:
        """Appends one record to metrics.jsonl."""
        if self._metrics is not None:
            self._metrics.write(record)

    def step(self, stage: str, step: int, num_steps: int, values: Mapping[str, object]) -> None:
        """Prints the step line and appends it to metrics.jsonl, with the seconds of each part since the last step.

        ``values`` may hold more than the line shows (STEP_ORDER); all of it is kept. ``step`` counts from 1.
        """
        now = self.timer.snapshot()
        seconds, self._last_step = since(now, self._last_step), now
        values = {"mem_bytes": memory_bytes(), **values}
        self.metrics({"kind": "step", "stage": stage, "step": step, "time": time.time(), **values, "seconds": seconds})
        self.info(format_step(stage, step, num_steps, values, seconds))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage: its wall clock and the seconds of each part go to metrics.jsonl, also when it fails."""
        before, start = self.timer.snapshot(), time.perf_counter()
        self._last_step = before
        try:
            yield
        finally:
            wall_s = time.perf_counter() - start
            seconds = since(self.timer.snapshot(), before)
            rest = wall_s - sum(seconds.values())
            if rest > 1e-3:
                seconds["other"] = seconds.get("other", 0.0) + rest
            self.metrics({"kind": "time", "stage": name, "wall_s": wall_s, "seconds": seconds})
            parts = ", ".join(f"{part} {spent:.1f}s" for part, spent in seconds.items())
            self.info(f"{name} took {wall_s:.1f}s ({parts})")

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Bar]:
        """A bar on a terminal, a line every ten seconds elsewhere. Nested bars share one display."""
        owner = self._progress is None and self.rank == 0 and self.console.is_terminal
        if owner:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TimeRemainingColumn(), console=self.console, transient=True,
            )  # fmt: skip
            self._progress.start()
        try:
            yield Bar(self, text, total, self._progress)
        finally:
            if owner and self._progress is not None:
                self._progress.stop()
                self._progress = None

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def set_aside_metrics(path: Path, target: Path, stages: Sequence[str]) -> None:
    """Moves the records of some stages, their evaluation and critic rounds included, from one metrics.jsonl to another."""
    if not path.exists():
        return
    names = {variant for stage in stages for variant in (stage, f"eval.{stage}", f"{stage}.critic")}
    lines = path.read_text().splitlines(keepends=True)
    moved = [line for line in lines if line.endswith("\n") and msgspec.json.decode(line).get("stage") in names]
    write_atomic(target, "".join(moved))
    write_atomic(path, "".join(line for line in lines if line not in set(moved)))


def wall_seconds(path: Path) -> dict[str, float]:
    """Stage -> wall-clock seconds, all launches together. A launch that was killed does not count: it wrote no time."""
    seconds: dict[str, float] = {}
    for record in read_metrics(path):
        if record.get("kind") == "time":
            stage = str(record["stage"])
            seconds[stage] = seconds.get(stage, 0.0) + _float(record["wall_s"])
    return seconds


def read_metrics(path: Path | str) -> list[dict[str, object]]:
    """The records of metrics.jsonl; a torn last line is left out. A step logged again after a resume counts once, last.

    Raises ValueError with the line number for a malformed line elsewhere.
    """
    records: list[dict[str, object]] = []
    steps: dict[tuple[object, object], int] = {}
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line, type=dict[str, object])
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: not a metrics record ({error})") from None
        key = (record.get("stage"), record.get("step"))
        if record.get("kind") == "step" and key in steps:
            records[steps[key]] = record
            continue
        if record.get("kind") == "step":
            steps[key] = len(records)
        records.append(record)
    return records
