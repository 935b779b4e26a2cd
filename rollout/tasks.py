"""Reads Harbor task folders (schema 1.4). What cannot be honoured is refused by name, never ignored."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..sandbox import Sandbox, SandboxError, SandboxSpec
from .records import Healthcheck, Task

REQUIRED = ("instruction.md", "task.toml", "tests/test.sh")
KNOWN = {
    "": {"schema_version", "source", "task", "metadata", "agent", "verifier", "environment", "solution"},
    "task": {"name", "version", "description", "authors", "keywords"},
    "agent": {"timeout_sec", "network_mode"},
    "verifier": {"timeout_sec", "environment_mode", "env"},
    "environment": {
        "network_mode", "memory_mb", "workdir", "docker_image", "build_timeout_sec", "cpus", "storage_mb", "gpus", "env",
        "healthcheck", "allow_internet", "memory", "storage",
    },
    "environment.healthcheck": {"command", "interval_sec", "timeout_sec", "retries"},
    "solution": {"env"},
}  # fmt: skip
DAY_S = 86400.0  # no time of a task may be longer


class Table:
    """One table of task.toml. Every key is read with its type, and the keys that nobody knows are refused."""

    def __init__(self, where: Path, name: str, values: Any):
        if not isinstance(values, dict):
            raise ValueError(f"{where}: [{name}] must be a table")
        unknown = set(values) - KNOWN.get(name, set(values))
        if unknown:
            table = f"[{name}]" if name else "the top level"
            raise ValueError(f"{where}: {table} has {sorted(unknown)}, which this trainer does not support")
        self.where, self.name, self.values = where, name, values

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        kinds = (int, float) if isinstance(default, float) else (type(default),)
        if default is not None and (not isinstance(value, kinds) or isinstance(value, bool) != (bool in kinds)):
            raise ValueError(f"{self.where}: {self.name}.{key} is {value!r}, expected {kinds[-1].__name__}")
        return value

    def number(self, key: str, default: Any, low: float, high: float) -> Any:
        """An int or a float, as the default is, that lies in [low, high]."""
        value = self.get(key, default)
        if not low <= value <= high:
            raise ValueError(f"{self.where}: {self.name}.{key} must lie in [{low:g}, {high:g}], got {value}")
        return value

    def optional(self, key: str, kind: type, low: float, high: float) -> Any:
        return self.number(key, kind(low), low, high) if key in self.values else None

    def env(self) -> dict[str, str]:
        table = self.get("env", {})
        return {k: _expand(str(v), f"{self.where}: {self.name}.env.{k}") for k, v in table.items()}

    def megabytes(self, key: str, deprecated: str, low: int) -> int | None:
        """``key``, or the deprecated form of it: a text such as "2G"."""
        if deprecated not in self.values or key in self.values:
            return self.optional(key, int, low, 1 << 30)
        match = re.fullmatch(r"(\d+)([MG])B?", self.get(deprecated, "").upper())
        if match is None:
            raise ValueError(f"{self.where}: {self.name}.{deprecated} must look like '512M' or '2G'; better {key} = 512")
        return int(match[1]) << (10 if match[2] == "G" else 0)


def load_task(folder: Path | str) -> Task:
    """Reads and checks one task folder. Raises ValueError that names the file and says what to change.

    ``build_timeout_sec`` bounds an image build; tasks that need one are refused later, by ``environment_files``.
    """
    folder = Path(folder)
    instruction, document = _read(folder)
    path = folder / "task.toml"
    root = Table(path, "", document)
    agent, verifier, environment, metadata, solution, _ = (
        Table(path, name, root.values.get(name, {}))
        for name in ("agent", "verifier", "environment", "metadata", "solution", "task")
    )
    _refuse(agent, environment, verifier)
    environment.optional("build_timeout_sec", float, 1, DAY_S)
    return Task(
        task_id=folder.name,
        path=str(folder),
        instruction=instruction,
        workdir=environment.get("workdir", "/app"),
        env=environment.env(),
        agent_timeout_s=float(agent.number("timeout_sec", 120.0, 0.1, DAY_S)),
        verifier_timeout_s=float(verifier.number("timeout_sec", 600.0, 0.1, DAY_S)),
        verifier_env=verifier.env(),
        solution_env=solution.env(),
        max_turns=metadata.number("max_turns", 20, 1, 1_000_000),
        memory_mb=environment.megabytes("memory_mb", "memory", 16),
        cpus=environment.optional("cpus", float, 0.01, 1024),
        storage_mb=environment.megabytes("storage_mb", "storage", 1),
        healthcheck=_healthcheck(path, environment.get("healthcheck", {})),
        docker_image=environment.get("docker_image", "") or None,
        baseline_fraction=_fraction(metadata),
    )


def _read(folder: Path) -> tuple[str, dict[str, Any]]:
    """The instruction and the parsed task.toml."""
    if not folder.is_dir():
        raise ValueError(f"task folder {folder} does not exist")
    for name in REQUIRED:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is not a Harbor task: {name} is missing")
    path = folder / "task.toml"
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    try:
        instruction = (folder / "instruction.md").read_text().strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder / 'instruction.md'} is not UTF-8 text: {error}") from error
    if not instruction:
        raise ValueError(f"{folder / 'instruction.md'} is empty")
    return instruction, document


def _healthcheck(path: Path, values: Any) -> Healthcheck | None:
    table = Table(path, "environment.healthcheck", values)
    if not table.values:
        return None
    if not table.get("command", ""):
        raise ValueError(f"{path}: environment.healthcheck.command is missing")
    return Healthcheck(
        command=table.get("command", ""),
        interval_s=float(table.number("interval_sec", 5.0, 0.0, DAY_S)),
        timeout_s=float(table.number("timeout_sec", 30.0, 0.1, DAY_S)),
        retries=table.number("retries", 3, 1, 10_000),
    )


def sandbox_spec(task: Task, default: SandboxSpec) -> SandboxSpec:
    """The configured kind of box with what the task states for itself.

    ValueError for a value that no box can have, such as a working directory in /usr.
    """
    stated: dict[str, Any]
    stated = {"memory_mb": task.memory_mb, "cpus": task.cpus, "disk_mb": task.storage_mb, "image": task.docker_image}
    return replace(default, workdir=task.workdir, env=task.env, **{k: v for k, v in stated.items() if v is not None})


async def prepare(box: Sandbox, task: Task) -> None:
    """Puts the start files into a new box and waits until its healthcheck passes.

    SandboxError when it never does; ValueError for a task that needs an image build.
    """
    await box.write_files(environment_files(task))
    check = task.healthcheck
    if check is None:
        return
    for number in range(check.retries):
        result = await box.run(["/bin/bash", "-c", check.command], timeout_s=check.timeout_s, cwd=task.workdir)
        if result.exit_code == 0:
            return
        if number + 1 < check.retries:
            await asyncio.sleep(check.interval_s)
    raise SandboxError(f"healthcheck failed {check.retries} times: {(result.stderr or result.stdout).strip()[-300:]}")


def _expand(value: str, where: str) -> str:
    """``${NAME}`` and ``${NAME:-default}`` from this machine's environment, as Harbor does."""

    def look_up(match: re.Match[str]) -> str:
        found = os.environ.get(match["name"], match["default"])
        if found is None:
            raise ValueError(
                f"{where} needs the variable {match['name']}, which is not set; export it or give a default"
            )
        return found

    return re.sub(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}", look_up, value)


def _fraction(metadata: Table) -> float:
    value = float(metadata.get("baseline_fraction", 0.0))
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{metadata.where}: metadata.baseline_fraction must lie in [0, 1), got {value}")
    return value


def _refuse(agent: Table, environment: Table, verifier: Table) -> None:
    for table in (agent, environment):
        mode = table.get("network_mode", "no-network")
        if mode != "no-network":
            raise ValueError(f"{table.where}: {table.name}.network_mode = {mode!r}; only 'no-network' is supported")
    if environment.get("allow_internet", False):
        raise ValueError(f"{environment.where}: environment.allow_internet = true; only false is supported")
    if environment.get("gpus", 0) != 0:
        raise ValueError(f"{environment.where}: environment.gpus = {environment.get('gpus', 0)}; only 0 is supported")
    mode = verifier.get("environment_mode", "shared")
    if mode != "shared":
        raise ValueError(f"{verifier.where}: verifier.environment_mode = {mode!r}; only 'shared' is supported")


def load_suite(folder: Path | str) -> list[Task]:
    """Every task below ``folder``, sorted by name. One malformed task is an error that names it."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"task suite {folder} does not exist; make one with: python -m megatron_rsi tasks generate DIR"
        )
    tasks = [load_task(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    if not tasks:
        raise ValueError(f"{folder} holds no task folders")
    return tasks


def environment_files(task: Task) -> dict[str, bytes]:
    """Files of the start state by absolute path, read from ``environment/Dockerfile``: FROM, WORKDIR and COPY only.

    Raises ValueError for a Dockerfile that needs a real image build.
    """
    environment = Path(task.path) / "environment"
    dockerfile = environment / "Dockerfile"
    files: dict[str, bytes] = {}
    workdir = task.workdir
    if not dockerfile.exists():
        return files
    for line in filter(None, (raw.split("#", 1)[0].strip() for raw in dockerfile.read_text().splitlines())):
        verb, _, rest = line.partition(" ")
        if verb == "WORKDIR":
            workdir = os.path.join(workdir, rest.strip())
        if verb in ("FROM", "WORKDIR"):
            continue
        if verb != "COPY" or len(rest.split()) != 2:
            raise ValueError(
                f"{dockerfile}: {line!r} needs an image build; bubblewrap knows FROM, WORKDIR and COPY A B"
            )
        source, target = rest.split()
        absolute = os.path.normpath(os.path.join(workdir, target)) + ("/" if target.endswith(("/", ".")) else "")
        files |= _copied(environment, environment / source, absolute)
    return files


def _copied(environment: Path, source: Path, target: str) -> dict[str, bytes]:
    inside = environment.resolve()
    found = sorted(source.rglob("*")) if source.is_dir() else []
    for path in (source, *found):  # also through a link that lies in the folder
        if not path.resolve().is_relative_to(inside):
            raise ValueError(f"{environment}/Dockerfile copies from outside its folder: {path}")
    if source.is_dir():
        return {f"{target.rstrip('/')}/{p.relative_to(source)}": p.read_bytes() for p in found if p.is_file()}
    if not source.is_file():
        raise ValueError(f"{environment}/Dockerfile copies {source.name}, which does not exist")
    return {target + source.name if target.endswith("/") else target: source.read_bytes()}


def content_hash(task: Task) -> str:
    """sha256 over the task's instruction and environment: equal for the same instance under another name."""
    return _digest(task.instruction, Path(task.path) / "environment")


def folder_hash(task: Task) -> str:
    """sha256 over every file of the task folder: its instruction, environment, tests and solution."""
    return _digest("", Path(task.path), without="checked.json")


def _digest(text: str, root: Path, without: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p.relative_to(root) != Path(without)):
        digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
