"""The one contract of all sandboxes, run against every back end."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import subprocess
import time
from pathlib import Path

import pytest
from conftest import SPEC, Driver, start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rsi.sandbox import SandboxError, SandboxSpec

FORKS = """
import os
for number in range(100):
    try:
        if not os.fork():
            os.execlp("sleep", "sleep", "60")
    except OSError:
        break
print(number)
"""
HOGS = """
import os, time
for _ in range(8):
    if not os.fork():
        hog = bytearray(60 << 20)
        hog[::4096] = b"x" * len(hog[::4096])
        time.sleep(60)
"""
HYPOTHESIS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# -- the persistent shell --------------------------------------------------------------------------------------
def test_directory_variables_functions_and_status_last(box: Driver) -> None:
    box.exec("mkdir -p a/b; cd a/b; x=1; export Y=two; f() { echo called $1; }")
    assert box.out("pwd; echo $x $Y; f 3; bash -c 'echo $Y'") == "/app/a/b\n1 two\ncalled 3\ntwo\n"
    assert box.exec("(exit 7)").exit_code == 7
    assert box.exec("echo $?").stdout == "7\n"


def test_pristine_environment(box: Driver) -> None:
    env = dict(line.split("=", 1) for line in box.out("env").splitlines())
    wanted = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "TZ": "UTC",
        "LC_ALL": "C.UTF-8",
        "HOME": box.box.home,
        "COLOUR": "green",
    }
    assert {name: env[name] for name in wanted} == wanted
    assert set(env) - set(wanted) <= {"TERM", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME"}


def test_exit_code_and_outputs_apart(box: Driver) -> None:
    result = box.exec("echo out; echo err >&2; sh -c 'exit 5'")
    assert (result.exit_code, result.stdout, result.stderr) == (5, "out\n", "err\n")
    assert (result.timed_out, result.truncated) == (False, False)
    assert box.exec("sh -c 'kill -9 $$'").exit_code == 137


@pytest.mark.parametrize(
    "broken", ["echo 'one", 'echo "one', "echo $(", "for i in", "cat <<EOF\nx", "}", "echo `", "((", "\\"]
)
def test_broken_syntax_harms_nothing(box: Driver, broken: str) -> None:
    box.exec("x=kept")
    assert not box.exec(broken, timeout_s=5).timed_out
    assert box.out("echo $x") == "kept\n"


@pytest.mark.parametrize("reader", ["cat", "read line", "python3 -c 'input()'", "bash", "exec 5<&0; cat <&5"])
def test_nothing_waits_for_input(box: Driver, reader: str) -> None:
    assert not box.exec(reader, timeout_s=5).timed_out


def test_exit_ends_the_shell_alone(box: Driver) -> None:
    assert box.exec("cd /tmp; x=1; exit 3").exit_code == 3
    assert box.out('pwd; echo "[$x]"') == "/app\n[]\n"
    assert box.exec("set -e; false; echo not reached").exit_code == 1
    assert box.exec("kill -9 $$").exit_code == 137
    assert box.exec("exec sh -c 'echo replaced; exit 4'").exit_code == 4
    assert box.out("pwd") == "/app\n"


def test_the_shell_survives_what_its_own_machinery_could_trip_over(box: Driver) -> None:
    box.exec("exec >/dev/null 2>&1; exec 61>&-; set -x; trap 'echo trapped' DEBUG; echo() { :; }; eval() { :; }")
    assert "here" in box.exec("printf here", timeout_s=5).stdout
    box.exec("(builtin echo 0000 0 >&10; builtin echo 0000 0 >&11) 2>/dev/null; exit")
    assert box.out("echo after") == "after\n"


def test_nul_is_dropped_and_any_text_is_accepted(box: Driver) -> None:
    assert box.out("printf %s 'a\0b'") == "ab"
    assert box.exec("printf %s '\udcff\ud800'").exit_code == 0


def test_a_long_command_arrives_whole(box: Driver) -> None:
    text = "x" * 100_000 + "'"
    assert box.out(f"text={shlex.quote(text)}; echo ${{#text}}") == "100001\n"


@HYPOTHESIS
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=300))
def test_any_quoted_text_comes_back(box: Driver, text: str) -> None:
    assert box.out(f"printf %s {shlex.quote(text)}") == text


# -- time and output -------------------------------------------------------------------------------------------
def test_a_time_out_kills_the_whole_tree_and_keeps_the_directory(box: Driver) -> None:
    box.exec("sleep 1111 & cd /tmp; mkdir d; cd d")
    tree = "echo before; (trap '' TERM INT HUP; setsid bash -c 'sleep 2222; true' & sleep 3333; sleep 3334); sleep 4444"
    result = box.exec(tree, timeout_s=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "before\n")
    assert box.out("pwd") == "/tmp/d\n"
    assert sorted(box.processes()) == ["bash", "sleep 1111"]  # an earlier background process is not this command's


@pytest.mark.parametrize(
    "loop", ["while :; do :; done", "set -n", "kill -STOP $$", "exec 3<>/dev/null; read <&10; sleep 99"]
)
def test_a_shell_that_hangs_is_replaced(box: Driver, loop: str) -> None:
    assert box.exec(loop + "\nsleep 99", timeout_s=0.5).timed_out
    assert box.out("echo again") == "again\n"


def test_background_processes_hold_nothing_up(box: Driver) -> None:
    result = box.exec("(sleep 0.3; echo late) & sleep 5555 & echo now", timeout_s=5)
    assert (result.stdout, result.timed_out) == ("now\n", False)
    time.sleep(0.6)
    assert box.out("echo next") == "next\n"  # what was written between the commands belongs to none
    assert "sleep 5555" in box.processes()


def test_long_output_keeps_both_ends(box: Driver) -> None:
    result = box.exec("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last", max_output_bytes=1000)
    assert result.truncated and result.exit_code == 0
    assert result.stdout.startswith("first\nxxx") and result.stdout.endswith("xxx" + "last\n")
    assert f"\n[... {3000000 + 11 - 1000} bytes omitted ...]\n" in result.stdout
    assert len(result.stdout) == 1000 + len("\n[... 2999011 bytes omitted ...]\n")
    exact = box.exec("head -c 1000 /dev/zero | tr '\\0' y", max_output_bytes=1000)
    assert exact.stdout == "y" * 1000 and not exact.truncated
    assert box.exec("echo 123", max_output_bytes=0).truncated


def test_output_without_end_meets_the_time_out(box: Driver) -> None:
    result = box.exec("yes", timeout_s=0.5, max_output_bytes=100)
    assert result.timed_out and result.truncated and len(result.stdout) < 200
    box.exec("yes & echo")
    assert not box.exec("echo calm").timed_out


def test_bytes_that_are_no_utf8(box: Driver) -> None:
    assert box.out(r"printf 'a\xff\xfeb\xc3\xa9'") == "a��bé"


# -- run, files ------------------------------------------------------------------------------------------------
def test_run_is_clean_and_apart_from_the_shell(box: Driver) -> None:
    box.exec("cd /tmp; export SECRET=1; ulimit -n 50; exit() { :; }; umask 077")
    result = box.run("bash", "-c", "pwd; echo $SECRET$COLOUR$EXTRA; umask", env={"EXTRA": "!"})
    assert result.stdout == "/\ngreen!\n0022\n"
    assert box.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert box.run("cat").stdout == ""
    absent = box.run("no-such-program")
    assert absent.exit_code == 127 and "no-such-program" in absent.stderr
    assert box.run("true", cwd="/no/such").exit_code == 127


def test_run_leaves_no_process_and_obeys_its_time_out(box: Driver) -> None:
    assert box.run("bash", "-c", "setsid sleep 6666 & echo done").stdout == "done\n"
    assert box.run("bash", "-c", "sleep 7777 | sleep 7777", timeout_s=0.3).timed_out
    assert not [line for line in box.processes() if "6666" in line or "7777" in line]


def test_files_round_trip(box: Driver) -> None:
    every_byte = bytes(range(256)) * 1000
    box.write_files(
        {"/app/x/y/data": every_byte, "/tests/test.sh": b"#!/bin/sh\necho graded\n"}, executable=["/tests/test.sh"]
    )
    assert box.read_file("/app/x/y/data") == every_byte
    assert box.run("/tests/test.sh").stdout == "graded\n"
    assert box.out("stat -c %a /tests/test.sh x/y/data x") == "755\n644\n755\n"
    box.write_files({f"/tmp/{n}": str(n).encode() for n in range(300)})
    assert box.out("cat /tmp/? | wc -c; ls /tmp | wc -l") == "10\n300\n"


@HYPOTHESIS
@given(
    data=st.binary(max_size=2000),
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=30),
)
def test_any_bytes_under_any_name(box: Driver, data: bytes, name: str) -> None:
    if name in (".", ".."):
        return
    box.write_files({f"/app/{name}": data})
    assert box.read_file(f"/app/{name}") == data


def test_what_cannot_be_read_or_written(box: Driver) -> None:
    box.exec("mkfifo fifo; mkdir dir; ln -s loop loop; echo 12345 >long; ln -s /dev/zero zero")
    for path in ("/app/absent", "/app/fifo", "/app/dir", "/app/loop", "/app/long/below", "/app/zero"):
        with pytest.raises(FileNotFoundError):
            box.read_file(path)
    with pytest.raises(OSError) as caught:
        box.read_file("/app/long", max_bytes=5)
    assert caught.value.errno == errno.EFBIG
    assert box.read_file("/app/long", max_bytes=6) == b"12345\n"
    for path in ("relative", "/app/../x"):
        with pytest.raises(ValueError, match="must be absolute"):
            box.write_files({path: b""})
    with pytest.raises(SandboxError, match="upload"):
        box.write_files({"/proc/1/none/x": b""})


def test_uploads_replace_what_an_agent_laid_in_their_way(box: Driver) -> None:
    box.exec("mkdir -p /app/mine /tests/b.py/c; echo old >/tests/d")
    box.exec("ln -s /app/mine /tests/sub; ln -s /app/mine/t /tests/a.sh")
    wanted = {"/tests/sub/x": b"1", "/tests/a.sh": b"2", "/tests/b.py": b"3", "/tests/d/e": b"4"}
    box.write_files(wanted)
    assert {path: box.read_file(path) for path in wanted} == wanted
    assert box.out("find /app -type f | wc -l") == "0\n"


# -- the end of a trial ----------------------------------------------------------------------------------------
def test_kill_ends_every_process_of_the_agent(box: Driver) -> None:
    writer = "while :; do echo 1 >/logs/verifier/reward.txt; sleep 0.01; done"
    box.exec(f"setsid nohup bash -c '{writer}' >/dev/null 2>&1 & (trap '' TERM HUP; sleep 8888 & disown) & sleep 0.2")
    assert len(box.processes()) >= 3
    assert box.kill_processes() >= 3
    assert box.processes() == []
    box.run("rm", "-f", "/logs/verifier/reward.txt")
    time.sleep(0.3)
    with pytest.raises(FileNotFoundError):
        box.read_file("/logs/verifier/reward.txt")
    assert box.out("pwd") == "/app\n"


def test_reset_leaves_nothing(box: Driver) -> None:
    listing = (
        "find /app /tmp /logs /tests /solution ~ /dev/shm -printf '%p %m %U\\n' | sort; umask; env | sort; ulimit -a"
    )
    deep = 'import os\nfor _ in range(1200): os.mkdir("deep"); os.chdir("deep")'  # longer than any path may be
    new = box.out(listing)
    everywhere = "/app /tmp /logs/agent /logs/verifier /tests /solution ~ /dev/shm"
    box.exec(f"for d in {everywhere}; do echo x >$d/f; echo x >$d/.h; mkdir -p $d/a/b; done")
    box.exec("mkdir -p locked/in; echo >locked/in/f; chmod 000 locked/in locked")
    box.exec("chmod 777 /tests; chmod 000 /solution; rm -rf /logs/*")
    box.exec("ln -s /usr/bin link; mkfifo p; touch -- -rf '*' $'new\\nline'")
    box.exec("python3 -c 'import socket as s; s.socket(s.AF_UNIX).bind(\"sock\")'")
    box.exec(f"python3 -c '{deep}'; sleep 9999 & export LEFT=1; alias ls=false; umask 0")
    box.reset()
    assert box.processes() == ["bash"]
    assert box.out(listing) == new


def test_reset_takes_a_new_environment_but_no_other_shape(box: Driver) -> None:
    box.reset(spec=SandboxSpec(memory_mb=128, max_processes=32, disk_mb=16, env={"COLOUR": "red"}))
    assert box.out("echo $COLOUR") == "red\n"
    with pytest.raises(ValueError, match="cannot become"):
        box.reset(spec=SandboxSpec(memory_mb=64))
    assert box.out("echo fine") == "fine\n"


def test_snapshot_brings_the_tree_back(box: Driver) -> None:
    box.exec("echo one >f; mkdir -p d/e; echo two >d/e/g; echo t >/tests/t; ln -s f l; ln f h; mkfifo p")
    box.exec("chmod 750 d; chmod 000 d/e/g")
    snapshot = box.snapshot()
    listing = "find /app /tests -printf '%p %y %m %l %n\\n' | sort"
    before = box.out(listing)
    box.exec("rm -rf /app/*; echo other >f; echo z >/tests/z")
    box.reset(snapshot)
    assert box.out(listing) == before
    assert box.out("cat f h; chmod 600 d/e/g; cat d/e/g /tests/t") == "one\none\ntwo\nt\n"


# -- bounds ----------------------------------------------------------------------------------------------------
def test_a_memory_hog_dies_alone(box: Driver) -> None:
    result = box.exec("x=1; python3 -c 'b = bytearray(600 << 20); print(len(b))'", timeout_s=30)
    assert result.exit_code != 0 and "629145600" not in result.stdout
    box.write_files({"/tmp/hogs.py": HOGS.encode()})
    box.exec("python3 /tmp/hogs.py; sleep 2", timeout_s=30)
    assert len([line for line in box.processes() if "hogs" in line]) < 4  # 8 x 60 MB cannot all live in 128 MB
    assert box.box.alive and box.exec("echo ok").exit_code == 0


def test_a_fork_bomb_is_bounded_and_ends(box: Driver) -> None:
    bomb = "b() { while :; do b & done; }; b"
    box.exec(bomb, timeout_s=1.0)
    box.exec("f() { f | f & }; f", timeout_s=1.0)
    box.kill_processes()
    assert box.processes() == []
    assert box.out("echo calm") == "calm\n"
    box.write_files({"/tmp/fork.py": FORKS.encode()})
    assert SPEC.max_processes - 3 <= int(box.out("python3 /tmp/fork.py")) <= SPEC.max_processes + 3


def test_files_and_processor_time_are_bounded(box: Driver) -> None:
    big = box.exec("head -c 50000000 /dev/zero >big; stat -c %s big")
    assert int(big.stdout.split()[-1]) <= SPEC.disk_mb << 20
    box.reset(spec=SandboxSpec(memory_mb=128, max_processes=32, disk_mb=16, cpu_s=1))
    spin = box.exec("bash -c 'while :; do :; done'", timeout_s=30)
    assert spin.exit_code == 137 and not spin.timed_out


def test_no_network(box: Driver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = "import socket; socket.create_connection(('%s', %d), 3)"
        for address, port in (("127.0.0.1", server.getsockname()[1]), ("192.0.2.1", 80)):
            assert box.run("python3", "-c", connect % (address, port)).exit_code == 1
    assert [line.split(":")[0].strip() for line in box.out("tail -n +3 /proc/net/dev").splitlines()] == ["lo"]


def test_the_host_is_out_of_reach(box: Driver, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    places = ("/", "/usr", "/usr/bin", "/etc", "/var", "/run", "/dev", "/tmp")
    marker = f"marker-{os.getpid()}"
    with subprocess.Popen(["sleep", "300"]) as victim:
        box.exec(f"for d in {' '.join(places)} /proc; do touch $d/{marker}; done; kill -9 {victim.pid}; kill -9 -1")
        assert box.exec(f"cat {secret}").stdout == ""
        assert victim.poll() is None
        victim.kill()
    assert not [place for place in places if os.path.exists(f"{place}/{marker}")]


def test_the_supervisor_is_out_of_reach(box: Driver) -> None:
    signals = "for s in INT TERM KILL STOP CHLD HUP SEGV; do kill -$s 1; done"
    result = box.exec(f"{signals}; cat /proc/1/environ; for n in 0 1 2 3 4 5; do cat /proc/1/fd/$n; done", timeout_s=5)
    assert result.stdout == "" and result.stderr.count("Permission denied") == 7
    assert box.exec("for n in 0 1 2 3 4 5; do echo x >/proc/1/fd/$n; done").stderr.count("Permission denied") == 6
    descriptors = box.run("python3", "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))").stdout
    assert descriptors == "['0', '1', '2', '3']\n"  # 3 reads the directory: no control descriptor came along
    assert box.out("ls /proc/self/fd | wc -l") == "4\n"
    ptrace = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
    assert box.run("python3", "-c", ptrace).stdout == "-1\n"


def test_privileges_are_few(box: Driver) -> None:
    status = dict(
        line.split(":\t") for line in box.out("cat /proc/self/status").splitlines() if line.startswith(("Cap", "NoNew"))
    )
    assert status["NoNewPrivs"] == "1"
    allowed = 0 if box.kind != "docker" else 0b11101011  # chown, dac_override, fowner, kill, setgid, setuid
    assert int(status["CapEff"], 16) & ~allowed == 0 and int(status["CapBnd"], 16) & ~allowed == 0
    assert (
        box.exec(
            "unshare -Ur true || python3 -c 'import ctypes; exit(ctypes.CDLL(None).unshare(0x10000000) != 0)'"
        ).exit_code
        != 0
    )


# -- failures --------------------------------------------------------------------------------------------------
def test_one_call_at_a_time_and_none_after_close(box: Driver, tmp_path: Path) -> None:
    import asyncio

    async def both() -> None:
        first = asyncio.ensure_future(box.box.exec("sleep 0.3; echo a", timeout_s=5))
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="one call at a time"):
            await box.box.exec("echo b", timeout_s=5)
        assert (await first).stdout == "a\n"

    asyncio.run(both())
    box.close()
    box.close()
    with pytest.raises(SandboxError, match="closed"):
        box.exec("echo")


def test_a_cancelled_command_ends_the_box(box: Driver) -> None:
    import asyncio

    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await box.box.exec("sleep 12321", timeout_s=60)

    asyncio.run(cancel())
    assert not box.box.alive
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"12321" in _bytes(p)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("options", [{"timeout_s": 0.0}, {"timeout_s": float("inf")}, {"timeout_s": float("nan")}])
def test_time_outs_must_be_finite(box: Driver, options: dict) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        box.exec("true", **options)


@pytest.mark.parametrize("workdir", ["/", "app", "/usr/x", "/proc", "/app/../etc"])
def test_bad_workdir(workdir: str) -> None:
    with pytest.raises(ValueError, match="workdir"):
        SandboxSpec(workdir=workdir)


@pytest.mark.parametrize("kind", ["bubblewrap", "docker"])
@pytest.mark.parametrize("workdir", ["/work/deep/er", "/tmp/inner"])
def test_other_workdirs(kind: str, workdir: str, tmp_path: Path) -> None:
    from conftest import need

    need(kind)
    driver = Driver(kind, start(kind, tmp_path, SandboxSpec(workdir=workdir)))
    try:
        assert driver.out("pwd; echo x >f; ls") == f"{workdir}\nf\n"
        driver.reset()
        assert driver.out("pwd; ls") == f"{workdir}\n"
    finally:
        driver.close()
