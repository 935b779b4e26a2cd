"""The host's end of a supervised sandbox: frames over a socket, and the sandbox protocol on top of them."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from .base import (
    DEFAULT_OUTPUT_BYTES,
    TRIAL_DIRECTORIES,
    ExecResult,
    SandboxError,
    SandboxSpec,
    Snapshot,
)

SUPERVISOR_FILES = ("inside_processes.py", "inside_tree.py", "supervisor.py")
SUPERVISOR = b"\n".join(Path(__file__).with_name(name).read_bytes() for name in SUPERVISOR_FILES)
# python3 runs this; it reads the supervisor's size and source from standard input and becomes it.
BOOTSTRAP = (
    "import os\ndef take(n):\n s=b''\n while len(s)<n:\n  s+=os.read(0,n-len(s)) or os._exit(1)\n return s\n"
    "exec(compile(take(int(take(8))),'supervisor','exec'))"
)
REPLY_GRACE_S = 20.0  # beyond the time-out of a command; a supervisor that stays silent longer is dead
MAX_REPLY_BYTES = 1 << 30
BASE_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TZ": "UTC", "LC_ALL": "C.UTF-8", "TERM": "dumb"}


class Channel:
    """Frames over a stream socket. ``multiplexed``: replies come in Docker's attach format (8-byte stream headers).

    Uses the loop's socket calls alone, so that a warm box outlives one ``asyncio.run``.
    """

    def __init__(self, sock: socket.socket, multiplexed: bool = False) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.multiplexed = multiplexed
        self.buffer = bytearray()
        self.left_in_piece = 0
        self.stderr = bytearray()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def request(self, header: Mapping[str, object], body: bytes = b"") -> tuple[dict, bytes]:
        text = json.dumps(header).encode()
        await self.send(struct.pack(">II", len(text), len(body)) + text + body)
        return await self.reply()

    async def reply(self) -> tuple[dict, bytes]:
        """Next reply frame. EOFError when the other end is gone or does not speak the protocol."""
        header_bytes, body_bytes = struct.unpack(">II", await self._take(8))
        if header_bytes > 1 << 20 or body_bytes > MAX_REPLY_BYTES:
            raise EOFError("the sandbox answered with something that is no frame")
        header = json.loads(await self._take(header_bytes))
        return header, await self._take(body_bytes)

    async def _take(self, size: int) -> bytes:
        while len(self.buffer) < size:
            await self._receive()
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    async def _receive(self) -> None:
        if not self.multiplexed:
            self.buffer += await self._read(1 << 18)
            return
        kind, size = struct.unpack(">B3xI", await self._read_exactly(8))
        data = await self._read_exactly(size)
        if kind == 2:
            self.stderr = (self.stderr + data)[-4096:]
        else:
            self.buffer += data

    async def _read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += await self._read(size - len(data))
        return data

    async def _read(self, size: int) -> bytes:
        data = await asyncio.get_running_loop().sock_recv(self.sock, size)
        if not data:
            raise EOFError("the sandbox closed its channel")
        return data

    def close(self) -> None:
        self.sock.close()


class SupervisedSandbox:
    """The sandbox protocol over a supervisor. A back end adds ``start``, ``_destroy`` and ``_failure_details``."""

    home = "/home/agent"

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.alive = False
        self.channel: Channel | None = None
        self._busy = False

    # -- what a back end provides ------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start the box. Raises SandboxError."""
        raise NotImplementedError

    async def _destroy(self) -> None:
        raise NotImplementedError

    async def _failure_details(self) -> str:
        """What the box said before it died."""
        raise NotImplementedError

    def _limits(self) -> dict[str, int]:
        """Resource limits of every process, by the name of the RLIMIT without its prefix."""
        raise NotImplementedError

    watch_memory_bytes: int | None = None

    # -- the protocol ------------------------------------------------------------------------------------------
    async def exec(self, command: str, *, timeout_s: float, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> ExecResult:
        _check_timeout(timeout_s)
        request = {"op": "exec", "timeout_s": timeout_s, "max_output_bytes": max_output_bytes}
        return _result(*await self._call(request, command.encode("utf-8", "replace"), timeout_s))

    async def type(self, keys: str, *, wait_s: float, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> bytes:
        _check_timeout(wait_s)
        request = {"op": "type", "wait_s": wait_s, "max_output_bytes": max_output_bytes}
        header, drawn = await self._call(request, keys.encode("utf-8", "replace"), wait_s)
        if "error" in header:
            raise SandboxError(f"the terminal could not be used: {header['message']}")
        return drawn

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> ExecResult:
        _check_timeout(timeout_s)
        if not argv:
            raise ValueError("argv is empty: it must name a program")
        request: dict[str, object] = {"op": "run", "argv": list(argv), "env": dict(env or {}), "cwd": cwd}
        request |= {"timeout_s": timeout_s, "max_output_bytes": max_output_bytes}
        return _result(*await self._call(request, b"", timeout_s))

    async def write_files(self, files: Mapping[str, bytes], *, executable: Collection[str] = ()) -> None:
        for path in (*files, *executable):
            _check_path(path)
        listing = [[path, len(data), path in executable] for path, data in files.items()]
        header, _ = await self._call({"op": "write", "files": listing}, b"".join(files.values()))
        if "error" in header:
            raise SandboxError(f"upload to the sandbox failed: {header['message']}")

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        _check_path(path)
        header, body = await self._call({"op": "read", "path": path, "max_bytes": max_bytes})
        if "error" in header:
            absent = header["error"] in (errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)
            raise OSError(errno.ENOENT if absent else header["error"], header["message"], path)
        return body

    async def clear(self, *paths: str) -> list[str]:
        for path in paths:
            _check_path(path)
        header, _ = await self._call({"op": "clear", "paths": list(paths)})
        if "error" in header:
            raise SandboxError(f"{', '.join(paths)} could not be emptied: {header['message']}")
        return header["found"]

    async def find(self, names: Collection[str], *below: str) -> dict[str, str]:
        _, body = await self._call({"op": "find", "names": sorted(names), "below": list(below)})
        return json.loads(body)

    async def changed_system_files(self) -> list[tuple[str, str]]:
        return []  # read-only

    async def kill_processes(self) -> int:
        header, _ = await self._call({"op": "kill"})
        return header["num_killed"]

    async def snapshot(self) -> Snapshot:
        header, archive = await self._call({"op": "snapshot"})
        if "error" in header:
            raise SandboxError(f"snapshot of the sandbox failed: {header['message']}")
        return Snapshot(archive)

    async def reset(self, snapshot: Snapshot | None = None, *, spec: SandboxSpec | None = None) -> None:
        self._adopt(spec)
        request = {"op": "reset", "config": self._config()}
        header, _ = await self._call(request, snapshot.archive if snapshot else b"")
        if "error" in header:
            await self.close()
            raise SandboxError(f"the sandbox could not be reset and was closed: {header['message']}")

    async def close(self) -> None:
        """End the sandbox and everything in it. May be called again."""
        self.alive = False
        if self.channel:
            self.channel.close()
            self.channel = None
        await self._destroy()

    # -- how -----------------------------------------------------------------------------------------------------
    def _adopt(self, spec: SandboxSpec | None) -> None:
        if spec is not None and spec.shape() != self.spec.shape():
            raise ValueError(f"a box of {self.spec.shape()} cannot become {spec.shape()}; start another one")
        self.spec = spec or self.spec

    def _config(self) -> dict[str, object]:
        return {
            "env": {**self._base_env(), **self.spec.env},
            "workdir": self.spec.workdir,
            "roots": self._roots(),
            "directories": [self.spec.workdir, self.home, *TRIAL_DIRECTORIES],
            "limits": self._limits(),
            "watch_memory_bytes": self.watch_memory_bytes,
        }

    def _base_env(self) -> dict[str, str]:
        return {**BASE_ENV, "HOME": self.home}

    def _roots(self) -> list[tuple[str, int]]:
        """The writable directories with their modes; none lies below another."""
        roots = {"/tmp": 0o1777, "/logs": 0o755, "/tests": 0o755, "/solution": 0o755, self.home: 0o755}
        if not any((self.spec.workdir + "/").startswith(root + "/") for root in roots):
            roots[self.spec.workdir] = 0o755
        return list(roots.items())

    async def _greet(self, timeout_s: float) -> None:
        """Send the supervisor into the box and configure it."""
        assert self.channel is not None
        try:
            async with asyncio.timeout(timeout_s):
                await self.channel.send(b"%8d" % len(SUPERVISOR) + SUPERVISOR)
                await self.channel.reply()
                header, _ = await self.channel.request({"op": "configure", "config": self._config()})
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            details = await self._failure_details()
            await self.close()
            raise SandboxError(f"the sandbox did not start: {details or repr(error)}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if "error" in header:
            await self.close()
            raise SandboxError(f"the sandbox did not start: {header['message']}")
        self.alive = True

    async def _call(self, request: dict, body: bytes = b"", timeout_s: float = 0.0) -> tuple[dict, bytes]:
        """One request. An interrupted or failed one leaves the channel out of step, so it ends the box."""
        if not self.alive or self.channel is None:
            raise SandboxError("the sandbox is closed")
        if self._busy:
            raise RuntimeError("a sandbox serves one call at a time; await the first one")
        self._busy, finished = True, False
        try:
            async with asyncio.timeout(timeout_s + REPLY_GRACE_S):
                reply = await self.channel.request(request, body)
            finished = True
            return reply
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            details = await self._failure_details()
            raise SandboxError(f"the sandbox died during {request['op']}: {details or repr(error)}") from error
        finally:
            self._busy = False
            if not finished:
                await self.close()


def _check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s < 1e6:
        raise ValueError(f"timeout_s={timeout_s} must be positive and finite")


def _check_path(path: str) -> None:
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ValueError(f"path {path!r} must be absolute, without '..'")


def _result(header: dict, body: bytes) -> ExecResult:
    if "error" in header:
        raise SandboxError(f"the sandbox could not start a process: {header['message']}")
    cut = header.pop("stdout_bytes")
    stdout, stderr = (part.decode("utf-8", "replace") for part in (body[:cut], body[cut:]))
    return ExecResult(stdout=stdout, stderr=stderr, **header)
