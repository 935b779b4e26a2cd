"""Control groups for one box: memory and number of processes together. Where they are not writable: resource limits."""

from __future__ import annotations

import os
import time
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
CPU_PERIOD_US = 100_000


def _own_paths() -> dict[str, str]:
    """Controller name ("" for version 2) -> path of this process's own group."""
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path.strip("/")))
    return paths


def _parents(controllers: tuple[str, ...]) -> list[Path]:
    """Directories below which this process may try to make groups: one (version 2) or one a controller (version 1)."""
    try:
        own = _own_paths()
    except OSError:
        return []
    if (CGROUP_ROOT / "cgroup.controllers").exists():
        return [CGROUP_ROOT / own.get("", "")]
    mounts = {name: CGROUP_ROOT / name for name in controllers}
    return [mount / own[name] if (mount / own.get(name, "-")).is_dir() else mount for name, mount in mounts.items()]


class ControlGroup:
    """The groups of one box. ``create`` returns None where this process may not make them."""

    def __init__(self, directories: list[Path]) -> None:
        self.directories = directories

    @classmethod
    def create(
        cls, name: str, memory_bytes: int, max_processes: int, cpus: float | None = None
    ) -> ControlGroup | None:
        group, controllers = cls([]), ("memory", "pids", *(["cpu"] if cpus else []))
        try:
            for parent in _parents(controllers):
                if not os.access(parent, os.W_OK):
                    raise PermissionError(parent)
                if (parent / "cgroup.subtree_control").exists():
                    (parent / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in controllers))
                directory = parent / name
                directory.mkdir()
                group.directories.append(directory)
            group._limit(memory_bytes, max_processes, cpus)
        except OSError:
            group.remove()
            return None
        return group if group.directories else None

    def _limit(self, memory_bytes: int, max_processes: int, cpus: float | None) -> None:
        values: dict[str, object]
        values = {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes,
                  "memory.max": memory_bytes, "memory.swap.max": 0, "pids.max": max_processes}  # fmt: skip
        if cpus:
            quota = round(cpus * CPU_PERIOD_US)
            values |= {"cpu.cfs_period_us": CPU_PERIOD_US, "cpu.cfs_quota_us": quota, "cpu.max": f"{quota} {CPU_PERIOD_US}"}
        written = set()
        for directory in self.directories:
            for file, value in values.items():
                if (directory / file).exists():
                    (directory / file).write_text(str(value))
                    written.add(file)
        if "pids.max" not in written or not written & {"memory.max", "memory.limit_in_bytes"}:
            raise OSError("the memory or the pids controller is missing")
        if cpus and not written & {"cpu.max", "cpu.cfs_quota_us"}:
            raise OSError("the cpu controller is missing")

    def members(self) -> set[int]:
        """Process ids in the groups."""
        found: set[int] = set()
        for directory in self.directories:
            try:
                found |= {int(pid) for pid in (directory / "cgroup.procs").read_text().split()}
            except OSError:
                continue
        return found

    def remove(self, patience_s: float = 2.0) -> bool:
        """Remove the groups once their processes are gone. False if the kernel still holds one."""
        deadline = time.monotonic() + patience_s
        for directory in self.directories:
            while directory.exists():
                try:
                    directory.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(0.005)
        return True
