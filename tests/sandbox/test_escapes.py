"""Ways out of a box, each tried from the inside: none may succeed, in either kind of box."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Driver

from megatron_rsi.sandbox.seccomp import program

# Each line is one attempt: it prints its name when the kernel let it through. The numbers are those of x86_64.
SYSCALLS = r"""
import ctypes, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
size, path = ctypes.c_size_t, ctypes.c_char_p
done = []
def call(name, number, *arguments):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if libc.syscall(number, *arguments) >= 0 else 1)
    if os.waitpid(pid, 0)[1] == 0:
        done.append(name)
def attempt(name, function):
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            os._exit(1)
    if os.waitpid(pid, 0)[1] == 0:
        done.append(name)
word = ctypes.create_string_buffer(256)
call("mount tmpfs", 165, path(b"x"), path(b"/app"), path(b"tmpfs"), size(0), None)
call("mount proc", 165, path(b"proc"), path(b"/tmp"), path(b"proc"), size(0), None)
call("bind mount", 165, path(b"/"), path(b"/tmp"), None, size(4096), None)
call("remount the root writable", 165, None, path(b"/"), None, size(32 | 4096), None)
call("remount /usr writable", 165, None, path(b"/usr"), None, size(32 | 4096), None)
call("unmount /proc", 166, path(b"/proc"), size(2))
call("pivot_root", 155, path(b"/app"), path(b"/app"))
call("fsopen", 430, path(b"proc"), size(0))
call("open_tree", 428, size(2**64 - 100), path(b"/"), size(1))
call("move_mount", 429, size(3), path(b""), size(2**64 - 100), path(b"/tmp"), size(4))
call("chroot", 161, path(b"/app"))
for flag, name in ((0x10000000, "user"), (0x20000, "mount"), (0x20000000, "pid"), (0x40000000, "network"),
                   (0x8000000, "ipc"), (0x4000000, "uts"), (0x2000000, "cgroup")):
    call("unshare " + name, 272, size(flag))
    call("clone into a new namespace: " + name, 56, size(flag | 17), None, None, None, None)
call("setns", 308, size(os.open("/proc/self/ns/net", os.O_RDONLY)), size(0))
call("ptrace process 1", 101, size(16), size(1), None, None)
call("ptrace seize process 1", 101, size(0x4206), size(1), None, None)
call("read the memory of process 1", 310, size(1), word, size(1), word, size(1), size(0))
call("write the memory of process 1", 311, size(1), word, size(1), word, size(1), size(0))
call("take a descriptor of process 1", 438, size(libc.syscall(434, 1, 0)), size(0), size(0))
call("keyctl", 250, size(0), size(2**64 - 3), size(1))
call("add_key", 248, path(b"user"), path(b"k"), word, size(4), size(2**64 - 3))
call("request_key", 249, path(b"user"), path(b"k"), None, size(2**64 - 3))
call("bpf map", 321, size(0), ctypes.create_string_buffer(b"\1\0\0\0\4\0\0\0\4\0\0\0\1", 72), size(72))
call("bpf program", 321, size(5), word, size(72))
call("perf_event_open", 298, word, size(0), size(2**64 - 1), size(2**64 - 1), size(0))
call("load a module", 175, word, size(256), path(b""))
call("kexec_load", 246, size(0), size(0), None, size(0))
call("reboot", 169, size(0xFEE1DEAD), size(672274793), size(0), None)
call("swapon", 167, path(b"/app"), size(0))
call("quotactl", 179, size(0), None, size(0), None)
call("open_by_handle_at", 304, size(2**64 - 100), word, size(0))
call("set the clock", 227, size(0), word)
call("adjust the clock", 159, ctypes.create_string_buffer(bytes([0, 1]), 256))
call("read the kernel log", 103, size(3), word, size(256))
call("set the host name", 170, path(b"evil"), size(4))
call("set the domain name", 171, path(b"evil"), size(4))
call("iopl", 172, size(3))
call("ioperm", 173, size(0x80), size(1), size(1))
call("a block device", 133, path(b"/tmp/disk"), size(0o60600), size(0x800))
call("a character device", 133, path(b"/tmp/mem"), size(0o20600), size(0x101))
call("a capability", 126, ctypes.create_string_buffer(bytes([0x22, 5, 8, 0x20, 0, 0, 0, 0])),
     ctypes.create_string_buffer(b"\xff" * 24))
call("a higher limit of processes", 160, size(6), ctypes.create_string_buffer(b"\xff" * 16)) if os.getuid() else None
attempt("a raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("a packet socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
attempt("the hypervisor's socket", lambda:
        socket.socket(40, socket.SOCK_STREAM).connect((2, 1)))
attempt("a new network interface", lambda: __import__("fcntl").ioctl(
        socket.socket(), 0x8914, b"lo".ljust(16, b"\0") + b"\x43\x10" + b"\0" * 22))
print(json.dumps(done))
"""
# Each must fail: exit code 0 is a way out.
COMMANDS = {
    "memory of process 1": "head -c 1 /proc/1/mem",
    "environment of process 1": "head -c 1 /proc/1/environ",
    "root of process 1": "ls /proc/1/root/",
    "working directory of process 1": "ls /proc/1/cwd/",
    "descriptors of process 1": "ls -l /proc/1/fd/ && cat /proc/1/fd/*",
    "stack of process 1": "cat /proc/1/stack",
    "memory of the kernel": "head -c 4096 /proc/kcore",
    "physical memory": "head -c 1 /dev/mem",
    "kernel log": "head -c 1 /dev/kmsg",
    "a disk": "head -c 1 /dev/sda || head -c 1 /dev/vda || head -c 1 /dev/nvme0n1",
    "kvm": "test -c /dev/kvm && exec 3<>/dev/kvm",
    "fuse": "test -c /dev/fuse && exec 3<>/dev/fuse",
    "tun": "test -c /dev/net/tun && exec 3<>/dev/net/tun",
    "a device node": "mknod /tmp/d b 8 0",
    "core pattern": "echo '|/bin/sh' > /proc/sys/kernel/core_pattern",
    "module loader": "echo /app/x > /proc/sys/kernel/modprobe",
    "hotplug helper": "echo /app/x > /sys/kernel/uevent_helper",
    "sysrq": "echo h > /proc/sysrq-trigger",
    "interrupts": "echo 1 > /proc/irq/default_smp_affinity",
    "forwarding": "echo 1 > /proc/sys/net/ipv4/ip_forward",
    "user namespaces": "echo 99 > /proc/sys/user/max_user_namespaces && unshare -Ur true",
    "a user namespace by its tool": "unshare -Ur true",
    "a mount namespace by its tool": "unshare -m true",
    "namespaces of process 1": "nsenter -t 1 -m true",
    "control group release agent": "d=$(echo /sys/fs/cgroup/*/ | cut -d' ' -f1); echo /app/x > $d/release_agent",
    "leaving the control group": "for f in /sys/fs/cgroup/*/cgroup.procs /sys/fs/cgroup/cgroup.procs; do"
    " test -e $f && echo $$ > $f && exit 0; done; exit 1",
    "a new control group": "mkdir /sys/fs/cgroup/memory/x || mkdir /sys/fs/cgroup/pids/x ||"
    " { test -e /sys/fs/cgroup/cgroup.controllers && mkdir /sys/fs/cgroup/x; }",
    "a higher memory limit": "for f in $(find /sys/fs/cgroup -name 'memory.*limit*' -o -name memory.max); do"
    " echo -1 > $f && exit 0; done; exit 1",
    "the socket of Docker": "python3 -c 'import socket as s; s.socket(s.AF_UNIX).connect(\"/var/run/docker.sock\")'",
    "the system bus": "python3 -c 'import socket as s; s.socket(s.AF_UNIX).connect(\"/run/dbus/system_bus_socket\")'",
    "a set-user-id program": "cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id; su - nobody -s /bin/sh -c '/tmp/id -u' | grep -qx 0",
    "sudo": "sudo -n true",
    "shadow": "grep -q '[$]' /etc/shadow",
    "a terminal of the host": "echo x > /dev/tty || { test -c /dev/console && echo x > /dev/console; }",
    "oom protection": "echo -1000 > /proc/self/oom_score_adj",
    "process 1 cannot be killed": "kill -9 1; sleep 0.1; ! kill -0 1",
    "a lower nice value": "python3 -c 'import os; os.nice(-5)'",
    "an address of the host": "python3 -c 'import socket; socket.create_connection((\"{address}\", {port}), 2)'",
    "the host's abstract sockets": "python3 -c 'import socket as s; s.socket(s.AF_UNIX).connect(\"\\0{abstract}\")'",
    "a file of the host": "cat {secret}",
    "a file of the host through the box's parents": "cat /app/../../../../../../{secret}",
    "a hard link out": "ln {secret} /tmp/s",
    "a signal to a process of the host": "kill -0 {pid} && grep -q {marker} /proc/{pid}/cmdline",
    "a process of the host": "grep -l 'outsid[e]-{number}' /proc/*/cmdline",
}


def test_enough_attempts() -> None:
    assert SYSCALLS.count("\ncall(") + SYSCALLS.count("\nattempt(") + len(COMMANDS) >= 40


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the calls are those of x86_64")
def test_no_system_call_leads_out(box: Driver) -> None:
    box.write_files({"/app/calls.py": SYSCALLS.encode()})
    result = box.exec("python3 calls.py", timeout_s=60)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == []


def test_no_command_leads_out(box: Driver, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    marker, abstract = f"outside-{os.getpid()}", f"megatron-rsi-{os.getpid()}"
    sleeper = [sys.executable, "-c", "import time; time.sleep(300)", marker]
    with (
        socket.create_server(("0.0.0.0", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix,
        subprocess.Popen(sleeper) as victim,
    ):
        unix.bind("\0" + abstract)
        unix.listen()
        facts = {"address": _own_address(), "port": server.getsockname()[1], "secret": secret, "pid": victim.pid}
        facts |= {"marker": marker, "abstract": abstract, "number": os.getpid()}
        try:
            assert _ways_out(box, facts) == []
            assert victim.poll() is None
        finally:
            victim.kill()
    assert secret.read_text() == "s" and secret.stat().st_nlink == 1
    assert box.out("echo still here") == "still here\n"


def _ways_out(box: Driver, facts: dict[str, object]) -> list[str]:
    found = []
    for name, command in COMMANDS.items():
        for key, value in facts.items():
            command = command.replace("{" + key + "}", str(value))
        script = box.run("bash", "-c", command, timeout_s=20, cwd="/app")
        found += [name] if script.exit_code == 0 else []
    return found


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def test_the_filter_of_system_calls_is_in_force(box: Driver) -> None:
    """2: a filter. Each refused call of ours is refused for every architecture that the program knows."""
    status = box.out("grep ^Seccomp: /proc/self/status")
    assert status.split() == ["Seccomp:", "2"]
    for machine in ("x86_64", "aarch64"):
        code = program(machine)
        assert len(code) % 8 == 0 and 50 < len(code) // 8 < 255
    assert program("riscv64") == b""
