"""Nothing is left behind: each process that opens sandboxes has a run folder that says whose they are.

``sweep`` at the next start removes what a killed owner could not: processes, control groups, containers, the folder.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .limits import ControlGroup

RUN_VARIABLE = "MEGATRON_RSI_RUN"  # in the environment of every process started on the host's side of a box


def default_scratch() -> Path:
    return Path(tempfile.gettempdir()) / f"megatron-rsi-{os.getuid()}"


@dataclass(frozen=True)
class Owner:
    """A process, named so that neither a reused pid, a reboot nor another machine is mistaken for it."""

    host: str
    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> Owner:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        start = _start_ticks(os.getpid())
        assert start is not None
        return cls(socket.gethostname(), boot_id, os.stat("/proc/self/ns/pid").st_ino, os.getpid(), start)

    def is_dead(self) -> bool:
        """True only when this machine can tell: owners on another machine or in another pid namespace live."""
        here = Owner.current()
        if self.host != here.host:
            return False
        if self.boot_id != here.boot_id:
            return True
        return self.pid_namespace == here.pid_namespace and _start_ticks(self.pid) != self.start_ticks


def _start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none or only a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


class Run:
    """The folder of this process below ``scratch``, there while a box uses it. One for each scratch and process."""

    _open: dict[tuple[Path, int], Run] = {}

    def __init__(self, scratch: Path) -> None:
        self.owner = Owner.current()
        self.directory = Path(tempfile.mkdtemp(prefix=f"run-{self.owner.pid}-", dir=scratch))
        self.id = self.directory.name
        self.cleanups: dict[int, Callable[[], None]] = {}
        self.notes: dict[str, object] = {"owner": vars(self.owner), "cgroups": [], "docker_hosts": []}
        self._save()

    @classmethod
    def enter(cls, scratch: Path | str | None, key: int, cleanup: Callable[[], None]) -> Run:
        """The run folder of this process, made if need be. ``cleanup`` is called at exit, before ``leave``."""
        path = Path(scratch) if scratch else default_scratch()
        path.mkdir(parents=True, exist_ok=True)
        run = cls._open.get((path.resolve(), os.getpid()))
        if run is None:
            run = cls._open[path.resolve(), os.getpid()] = cls(path)
        run.cleanups[key] = cleanup
        return run

    def leave(self, key: int) -> None:
        self.cleanups.pop(key, None)
        if not self.cleanups and self.owner.pid == os.getpid():
            shutil.rmtree(self.directory, ignore_errors=True)
            type(self)._open = {k: run for k, run in self._open.items() if run is not self}

    def note(self, kind: str, value: str) -> None:
        """Remember a control group or a Docker host for whoever has to sweep."""
        known = self.notes[kind]
        assert isinstance(known, list)
        if value not in known:
            known.append(value)
            self._save()

    def _save(self) -> None:
        temporary = self.directory / "owner.json.new"
        temporary.write_text(json.dumps(self.notes))
        temporary.replace(self.directory / "owner.json")


@atexit.register
def _leave_all() -> None:
    for (_, pid), run in list(Run._open.items()):
        if pid == os.getpid():
            for key, cleanup in list(run.cleanups.items()):
                cleanup()
                run.leave(key)


@dataclass
class SweepReport:
    """What ``sweep`` removed, and in ``problems`` what it could not."""

    num_runs: int = 0
    num_processes: int = 0
    num_containers: int = 0
    problems: tuple[str, ...] = ()


def sweep(scratch: Path | str | None = None) -> SweepReport:
    """Remove everything below ``scratch`` whose owner is dead. Call it once at the start of a program."""
    path = Path(scratch) if scratch else default_scratch()
    report = SweepReport()
    for directory in sorted(path.glob("run-*")) if path.is_dir() else []:
        notes = _dead_notes(directory)
        if notes is not None and _sweep_run(directory, notes, report):
            shutil.rmtree(directory, ignore_errors=True)
            report.num_runs += 1
    return report


def _dead_notes(directory: Path) -> dict | None:
    """The notes of a run whose owner is dead, else None."""
    try:
        notes = json.loads((directory / "owner.json").read_text())
        return notes if Owner(**notes["owner"]).is_dead() else None
    except FileNotFoundError:
        try:
            return {} if time.time() - directory.stat().st_mtime > 60 else None  # killed between mkdir and the notes
        except FileNotFoundError:
            return None


def _sweep_run(directory: Path, notes: dict, report: SweepReport) -> bool:
    groups = ControlGroup([Path(group) for group in notes.get("cgroups", ())])
    victims = groups.members() | _processes_of(directory)
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
            report.num_processes += 1
        except ProcessLookupError:
            pass
    _wait_gone(directory)
    problems = [] if groups.remove() else [f"{directory.name}: control groups still in use"]
    for host in notes.get("docker_hosts", ()):
        from .docker import remove_containers

        removed, problem = remove_containers(host, directory.name)
        report.num_containers += removed
        problems += [f"{directory.name}: {problem}"] if problem else []
    report.problems += tuple(problems)
    return not problems


def _processes_of(directory: Path) -> set[int]:
    """Processes on the host's side of the boxes of a run: they carry its folder in their environment."""
    mark = f"{RUN_VARIABLE}={directory.name}\0".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def _wait_gone(directory: Path, patience_s: float = 2.0) -> None:
    deadline = time.monotonic() + patience_s
    while _processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.01)
