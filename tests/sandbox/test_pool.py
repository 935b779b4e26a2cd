"""The pool hands out boxes as new, never more than its size, and replaces what died."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import SPEC, need

from megatron_rsi.sandbox import BubblewrapSandbox, SandboxError, SandboxPool, SandboxSpec, make_sandbox
from megatron_rsi.sandbox.channel import SupervisedSandbox
from megatron_rsi.sandbox.limits import ControlGroup


@pytest.fixture(params=["bubblewrap", "docker"])
def kind(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return request.param


def test_a_box_is_reused_as_new(kind: str, tmp_path: Path) -> None:
    async def main() -> tuple[int, int, int]:
        async with SandboxPool(kind, 2, SPEC, tmp_path) as pool:
            for colour in ("green", "red", "blue"):
                async with pool.lease(replace(SPEC, env={"COLOUR": colour})) as box:
                    result = await box.exec("echo $COLOUR; ls; pgrep sleep", timeout_s=5)
                    assert (result.stdout, result.stderr) == (f"{colour}\n", "")
                    await box.exec("echo left >f; cd /tmp; export COLOUR=black; sleep 1000 &", timeout_s=5)
            return pool.counters.started, pool.counters.reused, pool.counters.died

    assert asyncio.run(main()) == (1, 2, 0)
    assert list(tmp_path.iterdir()) == []


def test_never_more_boxes_than_its_size(kind: str, tmp_path: Path) -> None:
    async def main() -> tuple[int, int]:
        now = most = 0
        both = asyncio.Barrier(2)

        async def trial(pool: SandboxPool, number: int) -> None:
            nonlocal now, most
            async with pool.lease(replace(SPEC, disk_mb=8 + number % 2)) as box:  # two shapes compete for the slots
                now, most = now + 1, max(most, now + 1)
                if number < 2:
                    await both.wait()
                assert (await box.exec(f"echo {number}", timeout_s=5)).stdout == f"{number}\n"
                now -= 1

        async with SandboxPool(kind, 2, SPEC, tmp_path) as pool:
            await asyncio.gather(*(trial(pool, number) for number in range(6)))
            assert len(pool._idle) <= 2
            return most, pool.counters.started + pool.counters.reused

    assert asyncio.run(main()) == (2, 6)
    assert list(tmp_path.iterdir()) == []


def test_a_box_that_died_is_replaced(kind: str, tmp_path: Path) -> None:
    async def main() -> tuple[int, int, int]:
        async with SandboxPool(kind, 1, SPEC, tmp_path) as pool:
            with pytest.raises(SandboxError, match="died during exec"):
                async with pool.lease() as box:
                    await lose(box)
                    await box.exec("echo", timeout_s=5)
            async with pool.lease() as box:
                assert (await box.exec("echo alive", timeout_s=5)).stdout == "alive\n"
            await lose(pool._idle[0])  # between two leases
            async with pool.lease() as box:
                assert (await box.exec("echo alive", timeout_s=5)).stdout == "alive\n"
            return pool.counters.started, pool.counters.reused, pool.counters.died

    assert asyncio.run(main()) == ((3, 0, 2) if kind == "bubblewrap" else (2, 1, 1))  # Docker's reset makes a new one
    assert list(tmp_path.iterdir()) == []


async def lose(box: object) -> None:
    """End a box from outside, as a crash or the memory killer would."""
    if hasattr(box, "process"):
        box.process.kill()
        box.process.wait()
    else:
        from megatron_rsi.sandbox.docker import _client, _remove

        _remove(_client(box.host), box.name)


def test_shared_memory_makes_a_box_unfit_for_another_lease(tmp_path: Path) -> None:
    async def main() -> tuple[int, int, int]:
        async with SandboxPool("bubblewrap", 1, SPEC, tmp_path) as pool:
            async with pool.lease() as box:
                command = "python3 -c 'import ctypes; print(ctypes.CDLL(None).shmget(1, 4096, 0o1666))'"
                assert int((await box.exec(command, timeout_s=5)).stdout) >= 0
            async with pool.lease() as box:
                assert (await box.exec("wc -l </proc/sysvipc/shm", timeout_s=5)).stdout == "1\n"
            return pool.counters.started, pool.counters.reused, pool.counters.died

    assert asyncio.run(main()) == (2, 0, 1)


def test_an_error_in_a_lease_leaves_nothing(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with SandboxPool(kind, 2, SPEC, tmp_path) as pool:
            other = asyncio.ensure_future(hold(pool))
            await asyncio.sleep(0.5)
            async with pool.lease() as box:
                await box.exec("sleep 1000 &", timeout_s=5)
                raise KeyError("of the caller")
        other.cancel()

    async def hold(pool: SandboxPool) -> None:
        async with pool.lease():
            await asyncio.sleep(60)

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pool_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        pool = SandboxPool("bubblewrap", 1, SPEC, tmp_path)
        await pool.close()
        with pytest.raises(SandboxError, match="pool is closed"):
            async with pool.lease():
                pass

    asyncio.run(main())


@pytest.mark.parametrize("make", [lambda: SandboxPool("podman", 1), lambda: asyncio.run(make_sandbox("podman"))])
def test_unknown_kind(make: object) -> None:
    with pytest.raises(ValueError, match="'podman'; valid: bubblewrap, docker"):
        make()  # type: ignore[operator]


def test_bubblewrap_has_no_images() -> None:
    with pytest.raises(ValueError, match="'ubuntu' needs the docker sandbox"):
        asyncio.run(make_sandbox("bubblewrap", SandboxSpec(image="ubuntu")))


def test_a_daemon_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError, match="no Docker daemon at .*none.sock.*scripts/docker_daemon start"):
        asyncio.run(make_sandbox("docker", scratch=tmp_path / "scratch"))


def test_an_image_that_is_not_there(tmp_path: Path) -> None:
    need("docker")
    with pytest.raises(SandboxError, match="'no/such:image' is not on this machine"):
        asyncio.run(make_sandbox("docker", SandboxSpec(image="no/such:image"), tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_processors_are_limited_or_refused(kind: str, tmp_path: Path) -> None:
    spec = replace(SPEC, cpus=0.5)

    async def main() -> tuple[object, ...]:
        box = await make_sandbox(kind, spec, tmp_path)
        try:
            assert (await box.exec("echo", timeout_s=5)).exit_code == 0
            return _limit_of(box)
        finally:
            await box.close()

    if kind == "docker" or _groups_are_writable():
        assert asyncio.run(main()) in ((500_000_000,), ("50000",), ("50000 100000",))
    if kind == "bubblewrap":
        with pytest.raises(ValueError, match="cpus=0.5 cannot be enforced here"):
            asyncio.run(BubblewrapSandbox(spec, tmp_path, control_groups=False).start())
    assert list(tmp_path.iterdir()) == []


def _groups_are_writable() -> bool:
    group = ControlGroup.create(f"megatron-rsi-test-{os.getpid()}", 1 << 26, 8, 0.5)
    return group is not None and group.remove()


def _limit_of(box: SupervisedSandbox) -> tuple[object, ...]:
    if isinstance(box, BubblewrapSandbox):
        assert box.group is not None
        files = [d / name for d in box.group.directories for name in ("cpu.cfs_quota_us", "cpu.max")]
        return tuple(file.read_text().strip() for file in files if file.exists())
    from megatron_rsi.sandbox.docker import DockerSandbox, _client

    assert isinstance(box, DockerSandbox)
    return (_client(box.host).inspect_container(box.name)["HostConfig"]["NanoCpus"],)


def test_containers_are_hardened(tmp_path: Path) -> None:
    need("docker")
    from megatron_rsi.sandbox.docker import RUN_LABEL, _client

    async def main() -> None:
        box = await make_sandbox("docker", SPEC, tmp_path)
        facts = _client(box.host).inspect_container(box.name)
        host = facts["HostConfig"]
        await box.close()
        assert (host["NetworkMode"], host["CapDrop"], host["Privileged"]) == ("none", ["ALL"], False)
        assert host["SecurityOpt"] == ["no-new-privileges"] and host["LogConfig"]["Type"] == "none"
        assert host["PidsLimit"] == SPEC.max_processes + 2 and host["Memory"] == host["MemorySwap"] == 160 << 20
        assert facts["Config"]["Labels"][RUN_LABEL].startswith("run-")

    asyncio.run(main())
