"""What a sandbox is: the description, the results, the one error, and the protocol that both back ends keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

# Directories that exist, empty, in every new sandbox, besides the working directory, /tmp and $HOME.
TRIAL_DIRECTORIES = ("/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests", "/solution")
# A working directory below one of these would hide or change the system of the sandbox.
SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/sys", "/var", "/run")
DEFAULT_OUTPUT_BYTES = 65536


class SandboxError(RuntimeError):
    """The sandbox itself failed: it did not start, it died, or a transfer failed. Never the fault of a command."""


@dataclass(frozen=True)
class SandboxSpec:
    """One kind of sandbox. Two leases with equal specs, ``env`` and ``cpu_s`` aside, can share one warm box.

    ``memory_mb`` counts all processes and the files together where control groups are writable, else each process
    alone and all processes by a watch. ``disk_mb`` bounds each writable directory of a bubblewrap box and each file
    of a container. ``cpu_s`` bounds the processor time of each process, ``cpus`` the processors that all of them use
    together (a bubblewrap box needs writable control groups for it). ``image`` belongs to Docker; bubblewrap shows
    the host's /usr and takes None or "host".
    """

    workdir: str = "/app"
    env: Mapping[str, str] = field(default_factory=dict)
    memory_mb: int = 512
    max_processes: int = 64
    cpu_s: float | None = None
    cpus: float | None = None
    disk_mb: int = 64
    network: bool = False
    image: str | None = None

    def __post_init__(self) -> None:
        parts = self.workdir.split("/")
        if parts[0] != "" or ".." in parts or "/" + parts[1] in (*SYSTEM_DIRECTORIES, "/"):
            raise ValueError(f"workdir {self.workdir!r} must be absolute and outside the system, for example '/app'")
        for name in ("memory_mb", "max_processes", "disk_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.memory_mb < 16:
            raise ValueError(f"memory_mb={self.memory_mb} is too little for a shell; use 16 or more")
        for name in ("cpu_s", "cpus"):
            if (value := getattr(self, name)) is not None and not 0.01 <= value < 1e6:
                raise ValueError(f"{name}={value} must be at least 0.01, or left out for no limit")

    def shape(self) -> SandboxSpec:
        """The part fixed when a box starts: boxes of equal shape are interchangeable after a reset."""
        return replace(self, env={}, cpu_s=None)


@dataclass(frozen=True)
class ExecResult:
    """Outcome of one command. ``exit_code`` is 128 + signal when a signal ended it and 124 after a time-out.

    Bytes that are not UTF-8 are decoded with replacement characters. ``truncated``: one of the outputs was longer
    than ``max_output_bytes`` and keeps its first and last half around the mark ``[... N bytes omitted ...]``.
    """

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    duration_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """The writable tree of a sandbox, as one tar archive. Processes and the shell's state are not part of it."""

    archive: bytes = field(repr=False)


class Sandbox(Protocol):
    """A place where an agent's commands run. One call at a time; every method may raise SandboxError."""

    spec: SandboxSpec
    alive: bool

    async def exec(self, command: str, *, timeout_s: float, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> ExecResult:
        """Run a command in the agent's one persistent bash: directory, variables and functions last.

        A time-out kills every process the command started and the shell itself; the next command finds a new shell
        in the same directory. ``exit`` ends the shell; the next command finds a new one in ``spec.workdir``.
        Standard input is empty. NUL characters are dropped from the command, as bash does.
        """

    async def type(self, keys: str, *, wait_s: float, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> bytes:
        """Type into the box's one terminal and return what was drawn within ``wait_s``, escape sequences and all.

        The terminal has 40 lines of 160 columns and a bash of its own, started by the first call and anew after it
        ended. Keys are passed on as they stand: "\\n" is Enter, "\\x03" Ctrl-C, "\\x1b" Escape. A program that draws
        more than the kernel keeps between two calls waits for the next one. ``kill_processes`` ends it.
        """

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> ExecResult:
        """Run a fresh process outside the agent's shell, its environment only the pristine one and ``env``.

        Everything it started is dead when this returns. A program that cannot be started is exit code 127.
        """

    async def write_files(self, files: Mapping[str, bytes], *, executable: Collection[str] = ()) -> None:
        """Write files, absolute path -> content, making parents. An existing file or link is replaced, not followed."""

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Content of a regular file. FileNotFoundError if there is none; OSError(EFBIG) beyond ``max_bytes``."""

    async def clear(self, *paths: str) -> list[str]:
        """Make these directories, empty, without running any program of the box. Returns what was in the way."""

    async def find(self, names: Collection[str], *below: str) -> dict[str, str]:
        """Path -> "file", "program", "link" (to a system file) or "special", of what is called one of ``names``.

        Searches the writable directories, or ``below``; directories are not reported.
        """

    async def changed_system_files(self) -> list[tuple[str, str]]:
        """("added" | "changed" | "deleted", path) outside the writable directories since the start of the box."""

    async def kill_processes(self) -> int:
        """Kill every process of the sandbox, the shell too, and wait until none is left. Returns how many."""

    async def snapshot(self) -> Snapshot:
        """Copy the writable tree."""

    async def reset(self, snapshot: Snapshot | None = None, *, spec: SandboxSpec | None = None) -> None:
        """Become as new: no process, empty writable tree (or the snapshot's), pristine environment.

        ``spec`` replaces the environment and processor limit; its shape must equal the current one.
        """

    async def close(self) -> None:
        """End the sandbox and everything in it. May be called again."""
