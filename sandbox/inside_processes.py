"""Inside a sandbox: starting, bounding, collecting and killing processes. First part of the supervisor's source."""

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import struct
import termios

PR_SET_DUMPABLE = 4


class Capture:
    """The first and the last half of up to ``limit`` bytes of one output."""

    def __init__(self, limit):
        self.half = max(limit // 2, 0)
        self.limit, self.total = limit, 0
        self.head, self.tail = bytearray(), bytearray()

    def feed(self, data):
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * self.limit + 65536:
            del self.tail[: -self.limit or None]

    @property
    def truncated(self):
        return self.total > self.limit

    def value(self):
        if not self.truncated:
            return bytes(self.head + self.tail)
        tail = bytes(self.tail[len(self.tail) - self.half :])
        omitted = self.total - len(self.head) - len(tail)
        return bytes(self.head) + b"\n[... %d bytes omitted ...]\n" % omitted + tail


class Processes:
    """Starts children and collects every dead process: orphans of the agent end up here too."""

    def __init__(self, control_fds):
        self.control_fds = control_fds
        self.statuses = {}  # of children that somebody waits for: pid -> None, then the exit code
        self.limits = []
        self.wake_r, wake_w = os.pipe()
        os.set_blocking(self.wake_r, False)
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def spawn(self, argv, env, cwds, fds, on_terminal=False):
        """Start a process in its own session, in the first of ``cwds`` it can enter, with ``fds`` (target -> source).

        ``on_terminal``: its standard input is a terminal that it shall control, for Ctrl-C and jobs.
        OSError(EAGAIN) at the process limit.
        """
        pid = os.fork()
        if pid == 0:
            try:
                self._become(argv, env, cwds, fds, on_terminal)
            except BaseException as error:
                os.write(2, f"{argv[0]}: {error}\n".encode("utf-8", "replace"))
            finally:
                os._exit(127)
        self.statuses[pid] = None
        return pid

    def _become(self, argv, env, cwds, fds, on_terminal):
        for fd in self.control_fds:
            os.close(fd)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for target, source in fds.items():
            os.dup2(source, target)
        if on_terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        prefer_as_memory_victim()
        for kind, value in self.limits:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        enter_first(cwds)
        os.umask(0o022)
        os.execvpe(argv[0], argv, env)

    def running(self, pid):
        return pid in self.statuses and self.statuses[pid] is None

    def reap(self):
        """Collect the dead without waiting. Returns False when no child is left at all."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_r, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid in self.statuses:
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
                self.statuses[pid] = code

    def kill_all(self):
        """Kill everything but this process and wait until the kernel says that no child is left."""
        num_killed = len(list_processes())
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            try:
                while True:
                    os.waitpid(-1, 0)
            except ChildProcessError:
                self.statuses.clear()
                return num_killed

    def kill_except(self, spared):
        """Kill every process outside ``spared`` and not below one of them, also those that fork while being killed."""
        for _ in range(50):
            victims = [pid for pid in list_processes() if not is_below(pid, spared)]
            if not victims:
                return
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            select.select([self.wake_r], [], [], 0.02)
            self.reap()
        self.kill_all()  # a fork bomb outran the list

    def keep_below(self, limit_bytes):
        """Kill the biggest process when all of them together hold more than ``limit_bytes`` of memory."""
        sizes = {}
        for pid in list_processes():
            try:
                with open(f"/proc/{pid}/statm", "rb") as file:
                    _, resident, shared, *_ = map(int, file.read().split())
                sizes[pid] = (resident - shared) * resource.getpagesize()
            except (OSError, ValueError):
                continue
        if sum(sizes.values()) > limit_bytes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(max(sizes, key=sizes.get), signal.SIGKILL)


def is_below(pid, ancestors):
    """Whether a process, or one it descends from, is among ``ancestors``. Orphans descend from process 1 alone."""
    while pid > 1 and pid not in ancestors:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return True  # gone: nothing to kill
    return pid > 1


def enter_first(cwds):
    for cwd in cwds[:-1]:
        try:
            return os.chdir(cwd)
        except OSError:
            continue
    return os.chdir(cwds[-1])


def list_processes():
    """Process ids other than this one; zombies included."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    except OSError:
        return []


def prefer_as_memory_victim():
    """Let the kernel kill the commands, not this supervisor, when memory runs out."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # only a preference; the limit itself holds


def read_now(fd):
    """What a pipe holds at this moment, without waiting for more."""
    waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    return os.read(fd, waiting) if waiting else b""
