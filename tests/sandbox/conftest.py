"""Boxes for the contract tests: one of each kind, as new for every test, driven without an event loop in sight."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterator

import pytest

from megatron_rsi.sandbox import BubblewrapSandbox, ExecResult, SandboxError, SandboxSpec, make_sandbox
from megatron_rsi.sandbox.channel import SupervisedSandbox

KINDS = ("bubblewrap", "bubblewrap-rlimits", "docker")
SPEC = SandboxSpec(memory_mb=128, max_processes=32, disk_mb=16, env={"COLOUR": "green"})


@functools.cache
def docker_problem() -> str:
    """Why there is no Docker here, or ""."""
    from megatron_rsi.sandbox.docker import DEFAULT_IMAGE, _client

    try:
        client = _client(os.environ.get("DOCKER_HOST", ""))
    except SandboxError as error:
        return str(error)
    tags = [tag for image in client.images() for tag in image["RepoTags"] or ()]
    return "" if DEFAULT_IMAGE in tags else f"the daemon has no image {DEFAULT_IMAGE}"


def need(kind: str) -> None:
    if kind == "docker" and docker_problem():
        if os.environ.get("MEGATRON_RSI_REQUIRE_DOCKER") == "1":
            pytest.fail(f"MEGATRON_RSI_REQUIRE_DOCKER=1, but {docker_problem()}")
        pytest.skip(docker_problem())


def start(kind: str, scratch: object, spec: SandboxSpec = SPEC) -> SupervisedSandbox:
    if kind != "bubblewrap-rlimits":
        return asyncio.run(make_sandbox(kind, spec, str(scratch)))
    box = BubblewrapSandbox(spec, str(scratch), control_groups=False)
    asyncio.run(box.start())
    return box


class Driver:
    """A sandbox whose methods block."""

    def __init__(self, kind: str, box: SupervisedSandbox) -> None:
        self.kind, self.box = kind, box

    def exec(self, command: str, timeout_s: float = 10.0, **options: int) -> ExecResult:
        return asyncio.run(self.box.exec(command, timeout_s=timeout_s, **options))

    def run(self, *argv: str, timeout_s: float = 10.0, **options: object) -> ExecResult:
        return asyncio.run(self.box.run(argv, timeout_s=timeout_s, **options))  # type: ignore[arg-type]

    def out(self, command: str) -> str:
        """Standard output of a command that succeeds and says nothing else."""
        result = self.exec(command)
        assert (result.exit_code, result.stderr) == (0, ""), result
        return result.stdout

    def processes(self) -> list[str]:
        """Command lines in the box besides its process 1 and this listing."""
        lines = self.run("ps", "-eo", "pid=,stat=,args=").stdout.splitlines()
        rows = [line.split(None, 2) for line in lines]
        return [
            args
            for pid, stat, args in rows
            if pid != "1" and not stat.startswith("Z") and not args.startswith("ps -eo")
        ]

    def __getattr__(self, name: str) -> object:
        method = getattr(self.box, name)
        return lambda *args, **options: asyncio.run(method(*args, **options))


@pytest.fixture(scope="session")
def _boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SupervisedSandbox]]:
    boxes: dict[str, SupervisedSandbox] = {}
    yield boxes
    for box in boxes.values():
        asyncio.run(box.close())


@pytest.fixture(params=KINDS)
def box(
    request: pytest.FixtureRequest, _boxes: dict[str, SupervisedSandbox], tmp_path_factory: pytest.TempPathFactory
) -> Driver:
    kind = request.param
    need(kind)
    if kind in _boxes and _boxes[kind].alive:
        asyncio.run(_boxes[kind].reset(spec=SPEC))
    else:
        _boxes[kind] = start(kind, tmp_path_factory.mktemp(kind))
    return Driver(kind, _boxes[kind])
