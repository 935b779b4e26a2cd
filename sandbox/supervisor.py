"""Process 1 of a sandbox: starts the commands, bounds them, kills them. Runs inside, from the standard library alone.

The host sends this file's source down standard input to a bare python3 (any from 3.8), then request frames; replies
come back on standard output. A frame is two big-endian uint32 (header bytes, body bytes), a JSON header, a body.

The agent runs under the same user, so this process protects itself: the kernel ignores signals to process 1 that it
has no handler for; it is not dumpable, so it can be neither traced nor reached through /proc/1/fd; and the control
descriptors are close-on-exec. The end of standard input means the host is gone: exit, and the kernel kills the rest.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import termios
import time

SCRIPT_FD, STATUS_FD, OUT_FD, ERR_FD = 0, 61, 63, 64  # of the agent's shell; high, so that agents can use 3..60
PR_SET_DUMPABLE = 4
TIMEOUT_CODE = 124


class HostGone(Exception):
    """The control channel is closed."""


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

    def spawn(self, argv, env, cwd, fds):
        """Start a process in its own session with ``fds`` (target -> source). OSError(EAGAIN) at the process limit."""
        pid = os.fork()
        if pid == 0:
            try:
                self._become(argv, env, cwd, fds)
            except BaseException as error:
                os.write(2, f"{argv[0]}: {error}\n".encode("utf-8", "replace"))
            finally:
                os._exit(127)
        self.statuses[pid] = None
        return pid

    def _become(self, argv, env, cwd, fds):
        for fd in self.control_fds:
            os.close(fd)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for target, source in fds.items():
            os.dup2(source, target)
        prefer_as_memory_victim()
        for kind, value in self.limits:
            resource.setrlimit(kind, (value, value))
        try:
            os.chdir(cwd)
        except OSError:
            os.chdir("/")
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
        """Kill every process outside ``spared``, also those that fork while being killed."""
        for _ in range(50):
            victims = [pid for pid in list_processes() if pid not in spared]
            if not victims:
                return
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            select.select([self.wake_r], [], [], 0.02)
            self.reap()
        self.kill_all()  # a fork bomb outran the list

    def largest_over(self, limit_bytes):
        """The biggest process when all of them together hold more than ``limit_bytes`` of memory, else None."""
        sizes = {}
        for pid in list_processes():
            try:
                with open(f"/proc/{pid}/statm", "rb") as file:
                    sizes[pid] = int(file.read().split()[1]) * resource.getpagesize()
            except (OSError, IndexError):
                continue
        return max(sizes, key=sizes.get) if sum(sizes.values()) > limit_bytes else None


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


def read_now(fd, most=None):
    """What a pipe holds at this moment, at most ``most`` bytes, without waiting for more."""
    waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    waiting = waiting if most is None else min(waiting, most)
    return os.read(fd, waiting) if waiting else b""


class Shell:
    """The agent's persistent bash. It reads its script from a pipe; each command is one eval."""

    def __init__(self, processes, env, cwd):
        self.last_code = 0
        script_r, self.script = os.pipe()
        self.status, status_w = os.pipe()
        self.out, out_w = os.pipe()
        self.err, err_w = os.pipe()
        null = os.open("/dev/null", os.O_RDWR)
        os.set_blocking(self.script, False)
        fds = {SCRIPT_FD: script_r, 1: null, 2: null, STATUS_FD: status_w, OUT_FD: out_w, ERR_FD: err_w}
        try:
            self.pid = processes.spawn(["bash"], env, cwd, fds)
        except OSError:
            self.close()
            raise
        finally:
            for fd in fds.values():
                if fd != null:
                    os.close(fd)
            os.close(null)

    def script_for(self, command, token):
        quoted = b"'" + command.replace(b"\0", b"").replace(b"'", b"'\\''") + b"'"
        before = b"" if not self.last_code else b"(exit %d)\n" % self.last_code  # so that $? lasts
        closed = b"%d>&- %d>&- %d>&-" % (STATUS_FD, OUT_FD, ERR_FD)
        run = b"builtin eval %s </dev/null >&%d 2>&%d %s\n" % (quoted, OUT_FD, ERR_FD, closed)
        return before + run + b"builtin echo %s $? >&%d\n" % (token, STATUS_FD)

    def cwd(self):
        try:
            path = os.readlink(f"/proc/{self.pid}/cwd")
        except OSError:
            return None
        return path if os.path.isdir(path) else None

    def close(self):
        for fd in (self.script, self.status, self.out, self.err):
            os.close(fd)


class Supervisor:
    """Serves one request at a time. ``config`` comes from the host: env, workdir, home, roots, limits."""

    def __init__(self, control_in, control_out):
        self.control_in, self.control_out = control_in, control_out
        self.processes = Processes([control_in, control_out])
        self.shell = None
        self.config = {}

    # -- frames ------------------------------------------------------------------------------------------------
    def read_exactly(self, size):
        data = bytearray()
        while len(data) < size:
            piece = os.read(self.control_in, min(size - len(data), 1 << 20))
            if not piece:
                raise HostGone
            data += piece
        return bytes(data)

    def reply(self, header, body=b""):
        text = json.dumps(header).encode()
        data = memoryview(struct.pack(">II", len(text), len(body)) + text + body)
        while data:
            data = data[os.write(self.control_out, data) :]

    def serve(self):
        self.reply({"hello": os.getpid()})
        while True:
            ready, _, _ = select.select([self.control_in, self.processes.wake_r], [], [])
            if self.processes.wake_r in ready:
                self.processes.reap()
            if self.control_in in ready:
                header_size, body_size = struct.unpack(">II", self.read_exactly(8))
                request = json.loads(self.read_exactly(header_size))
                self.answer(request, self.read_exactly(body_size))

    def answer(self, request, body):
        try:
            header, out = getattr(self, "do_" + request["op"])(request, body)
        except OSError as error:
            header, out = {"error": error.errno or errno.EIO, "message": f"{error.strerror}: {error.filename}"}, b""
        self.reply(header, out)
        if request["op"] in ("configure", "reset"):
            self.ensure_shell()  # ready before the first command asks for it

    # -- commands ----------------------------------------------------------------------------------------------
    def ensure_shell(self, cwd=None):
        if self.shell and self.processes.running(self.shell.pid):
            return
        self.drop_shell()
        cwd = cwd or self.config["workdir"]
        try:
            self.shell = Shell(self.processes, self.config["env"], cwd)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            self.processes.kill_all()  # the agent used up its processes; only it is to blame
            self.shell = Shell(self.processes, self.config["env"], cwd)

    def drop_shell(self):
        if self.shell:
            self.processes.statuses.pop(self.shell.pid, None)
            self.shell.close()
            self.shell = None

    def do_exec(self, request, command):
        self.processes.reap()
        self.ensure_shell()
        spared = set(list_processes()) - {self.shell.pid}
        shell, token = self.shell, os.urandom(8).hex().encode()
        outputs = self.captures(request, shell.out, shell.err)
        for fd in outputs:
            read_now(fd)  # what background processes wrote between the commands is nobody's output
        watch = Watch(self, outputs, request["timeout_s"], shell.pid)
        watch.to_write = (shell.script, shell.script_for(command, token))
        watch.status, watch.token = shell.status, token
        code = watch.wait()
        if code is None:
            cwd = shell.cwd()
            self.processes.kill_except(spared)
            self.drop_shell()
            self.ensure_shell(cwd)
        else:
            shell.last_code = code
        return self.result(code, watch, outputs.values())

    def do_run(self, request, _):
        self.processes.reap()
        spared = set(list_processes())
        out, out_w = os.pipe()
        err, err_w = os.pipe()
        null = os.open("/dev/null", os.O_RDWR)
        env = {**self.config["env"], **request["env"]}
        try:
            pid = self.processes.spawn(request["argv"], env, request["cwd"], {0: null, 1: out_w, 2: err_w})
        finally:
            for fd in (null, out_w, err_w):
                os.close(fd)
        outputs = self.captures(request, out, err)
        watch = Watch(self, outputs, request["timeout_s"], pid)
        code = watch.wait()
        self.processes.kill_except(spared)
        self.processes.statuses.pop(pid, None)
        for fd in outputs:
            os.close(fd)
        return self.result(code, watch, outputs.values())

    def captures(self, request, out, err):
        return {out: Capture(request["max_output_bytes"]), err: Capture(request["max_output_bytes"])}

    def result(self, code, watch, captures):
        stdout, stderr = (capture.value() for capture in captures)
        header = {
            "exit_code": TIMEOUT_CODE if code is None else code,
            "timed_out": code is None,
            "truncated": any(capture.truncated for capture in captures),
            "duration_s": time.monotonic() - watch.start,
            "stdout_bytes": len(stdout),
        }
        return header, stdout + stderr

    # -- files -------------------------------------------------------------------------------------------------
    def do_write(self, request, body):
        offset = 0
        for path, size, executable in request["files"]:
            self.make_way(path)
            mode = 0o755 if executable else 0o644
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
                file.write(body[offset : offset + size])
            offset += size
        return {}, b""

    def make_way(self, path):
        """Real parent directories and no entry at ``path``, whatever links or files an agent laid out below a root."""
        parts = path.strip("/").split("/")
        prefixes = ["/" + "/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        roots = [root + "/" for root, _ in self.config["roots"]]
        for prefix in prefixes:
            ours = any(prefix.startswith(root) for root in roots)
            is_directory = os.path.isdir(prefix) and not (ours and os.path.islink(prefix))
            if os.path.lexists(prefix) and ours and (prefix == prefixes[-1] or not is_directory):
                remove_entry(prefix, is_directory)
            if prefix != prefixes[-1] and not os.path.isdir(prefix):
                os.mkdir(prefix)

    def do_read(self, request, _):
        fd = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", request["path"])
            data = file.read(request["max_bytes"] + 1)
        if len(data) > request["max_bytes"]:
            raise OSError(errno.EFBIG, f"longer than {request['max_bytes']} bytes", request["path"])
        return {}, data

    def do_snapshot(self, *_):
        import io
        import tarfile

        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for root, _ in self.config["roots"]:
                add_to_archive(archive, root)
        return {}, buffer.getvalue()

    # -- life --------------------------------------------------------------------------------------------------
    def do_configure(self, request, _):
        self.config = request["config"]
        self.processes.limits = [(getattr(resource, "RLIMIT_" + k), v) for k, v in self.config["limits"].items()]
        self.make_directories()
        return {}, b""

    def do_kill(self, *_):
        num_killed = self.processes.kill_all()
        self.drop_shell()
        return {"num_killed": num_killed}, b""

    def do_reset(self, request, archive):
        self.do_kill()
        for root, mode in self.config["roots"]:
            wipe(root, mode)
        if shared_memory_left():
            raise OSError(errno.EBUSY, "System V shared memory, semaphores or queues are left", None)
        self.do_configure(request, b"")
        if archive:
            extract(archive)
        return {}, b""

    def make_directories(self):
        for path in self.config["directories"]:
            os.makedirs(path, exist_ok=True)


class Watch:
    """Waits for one command: collects its outputs until it ends or its time is over."""

    def __init__(self, supervisor, outputs, timeout_s, pid):
        self.processes, self.config = supervisor.processes, supervisor.config
        self.outputs, self.pid = outputs, pid
        self.start = time.monotonic()
        self.deadline = self.start + timeout_s
        self.control_in = supervisor.control_in
        self.status, self.token, self.to_write = None, b"", None
        self.reported = bytearray()
        self.open = set(outputs)

    def wait(self):
        """Exit code, or None at the time-out."""
        poll = select.poll()
        for fd in (*self.open, self.processes.wake_r):
            poll.register(fd, select.POLLIN)
        poll.register(self.control_in, 0)
        if self.status is not None:
            poll.register(self.status, select.POLLIN)
        code = None
        while code is None:
            self.push_script(poll)
            left = self.deadline - time.monotonic()
            if left <= 0:
                break
            code = self.step(poll, poll.poll(self.pause_ms(left)))
        for fd in self.open:
            self.outputs[fd].feed(read_now(fd))
        return code

    def pause_ms(self, left):
        return max(1, int(1000 * min(left, 0.05 if self.config["watch_memory_bytes"] else left)))

    def step(self, poll, events):
        code = None
        for fd, _ in events:
            if fd == self.control_in:  # registered for a hang-up alone
                raise HostGone
            if fd in self.outputs:
                self.collect(poll, fd)
            elif fd == self.status:
                code = self.reported_code(poll)
            elif fd == self.processes.wake_r:
                self.processes.reap()
        if self.config["watch_memory_bytes"]:
            self.check_memory()
        return self.processes.statuses.get(self.pid) if code is None else code

    def collect(self, poll, fd):
        data = os.read(fd, 65536)
        self.outputs[fd].feed(data)
        if not data:
            poll.unregister(fd)
            self.open.discard(fd)

    def reported_code(self, poll):
        """The status the shell wrote after the command; lines without this command's token do not count."""
        data = os.read(self.status, 4096)
        if not data:
            poll.unregister(self.status)
        self.reported += data
        *lines, self.reported = bytes(self.reported[-4096:]).split(b"\n")
        for line in lines:
            token, _, code = line.partition(b" ")
            if token == self.token and code.isdigit():
                return int(code)
        return None

    def push_script(self, poll):
        if self.to_write is None:
            return
        fd, data = self.to_write
        try:
            sent = os.write(fd, data)
        except BlockingIOError:
            sent = 0
        except BrokenPipeError:  # the shell died; its status follows
            sent = len(data)
        if sent < len(data):  # longer than the pipe: the rest as the shell reads
            self.to_write = (fd, data[sent:])
            poll.register(fd, select.POLLOUT)
        else:
            self.to_write = None
            poll.register(fd, 0)

    def check_memory(self):
        victim = self.processes.largest_over(self.config["watch_memory_bytes"])
        if victim is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)


# -- the writable tree -----------------------------------------------------------------------------------------
def wipe(root, mode):
    """Empty a directory that an agent may have filled with anything, and give it its mode back."""
    if not os.path.isdir(root):
        return
    os.chmod(root, mode)
    try:
        remove_entries(root)
    except (OSError, RecursionError):  # deeper than paths or this interpreter can go: the tools do not mind
        os.spawnv(os.P_WAIT, "/bin/chmod", ["chmod", "-R", "u+rwX", root])
        os.spawnv(os.P_WAIT, "/usr/bin/find", ["find", root, "-mindepth", "1", "-delete"])
        if os.listdir(root):
            raise OSError(errno.ENOTEMPTY, "could not be emptied", root) from None


def remove_entries(directory):
    with os.scandir(directory) as entries:
        found = list(entries)
    for entry in found:
        remove_entry(entry.path, entry.is_dir(follow_symlinks=False))


def remove_entry(path, is_directory):
    if not is_directory:
        os.unlink(path)
        return
    try:
        os.rmdir(path)
    except OSError:
        os.chmod(path, 0o700)
        remove_entries(path)
        os.rmdir(path)


def shared_memory_left():
    for name in ("shm", "sem", "msg"):
        try:
            with open("/proc/sysvipc/" + name, "rb") as file:
                if file.read().count(b"\n") > 1:
                    return True
        except OSError:
            pass
    return False


def add_to_archive(archive, path):
    """Add a file or a directory with all below; sockets are left out, unreadable files are read all the same."""
    info = archive.gettarinfo(path, arcname=path.lstrip("/"))
    if info is None:
        return
    readable = 0o500 if info.isdir() else 0o400
    if (info.isfile() or info.isdir()) and info.mode & readable != readable:
        os.chmod(path, info.mode | readable)
    if info.isfile():
        with open(path, "rb") as file:
            archive.addfile(info, file)
    else:
        archive.addfile(info)
    if info.isdir():
        for name in sorted(os.listdir(path)):
            add_to_archive(archive, os.path.join(path, name))
    if info.isfile() or info.isdir():
        os.chmod(path, info.mode)


def extract(data):
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        if hasattr(tarfile, "fully_trusted_filter"):
            archive.extraction_filter = staticmethod(tarfile.fully_trusted_filter)
        archive.extractall("/")


def main():
    control_in, control_out = os.dup(0), os.dup(1)
    os.umask(0o022)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 without a handler cannot be interrupted from inside
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise SystemExit("the supervisor cannot protect itself: prctl(PR_SET_DUMPABLE) failed")
    try:
        Supervisor(control_in, control_out).serve()
    except (HostGone, BrokenPipeError):
        sys.stdout = None
        os._exit(0)


if __name__ == "__main__":
    main()
