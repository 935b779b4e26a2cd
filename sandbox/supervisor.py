"""Process 1 of a sandbox: starts the commands, bounds them, kills them. Runs inside, from the standard library alone.

The host sends the source, inside_*.py and this file as one, down standard input to a bare python3 (any from 3.8),
then request frames; replies come back on standard output. A frame is two big-endian uint32 (header bytes, body
bytes), a JSON header, a body.

The agent runs under the same user, so this process protects itself: the kernel ignores signals to process 1 that it
has no handler for; it is not dumpable, so it can be neither traced nor reached through /proc/1/fd; and the control
descriptors are close-on-exec. The end of standard input means the host is gone: exit, and the kernel kills the rest.
"""

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
import termios
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # inside a sandbox the three files are one namespace
    from .inside_processes import PR_SET_DUMPABLE, Capture, Processes, list_processes, read_now
    from .inside_tree import add_to_archive, clear, extract, find, remove_entry, shared_memory_left, wipe

SCRIPT_FD, STATUS_FD, OUT_FD, ERR_FD = 0, 61, 63, 64  # of the agent's shell; high, so that agents can use 3..60
TIMEOUT_CODE = 124
TERMINAL_SIZE = (40, 160)  # lines, columns


class HostGone(Exception):
    """The control channel is closed."""


class Shell:
    """The agent's persistent bash. It reads its script from a pipe; each command is one eval."""

    def __init__(self, processes, env, cwds):
        self.last_code = 0
        script_r, self.script = os.pipe()
        self.status, status_w = os.pipe()
        self.out, out_w = os.pipe()
        self.err, err_w = os.pipe()
        null = os.open("/dev/null", os.O_RDWR)
        os.set_blocking(self.script, False)
        fds = {SCRIPT_FD: script_r, 1: null, 2: null, STATUS_FD: status_w, OUT_FD: out_w, ERR_FD: err_w}
        try:
            self.pid = processes.spawn(["bash"], env, cwds, fds)
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


class Terminal:
    """An interactive bash on a pty, for programs that draw or wait for keys. Nothing is read between two calls."""

    def __init__(self, processes, env, cwds):
        self.master, slave = os.openpty()
        try:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *TERMINAL_SIZE, 0, 0))
            fds = {0: slave, 1: slave, 2: slave}
            argv = ["bash", "--noprofile", "--norc", "-i"]
            self.pid = processes.spawn(argv, {**env, "TERM": "xterm", "PS1": "$ "}, cwds, fds, on_terminal=True)
        except OSError:
            self.close()
            raise
        finally:
            os.close(slave)
        os.set_blocking(self.master, False)

    def type(self, keys, wait_s, capture, control_in):
        """Write ``keys`` as the program takes them and collect what it draws, for ``wait_s``."""
        poll, end = select.poll(), time.monotonic() + wait_s
        poll.register(control_in, 0)
        while (left := end - time.monotonic()) > 0:
            poll.register(self.master, select.POLLIN | (select.POLLOUT if keys else 0))
            for fd, event in poll.poll(max(1, int(1000 * left))):
                if fd == control_in:
                    raise HostGone
                if event & select.POLLOUT and keys:
                    keys = keys[os.write(self.master, keys[:1024]) :]
                if event & select.POLLIN:
                    capture.feed(os.read(self.master, 65536))
                elif event & (select.POLLHUP | select.POLLERR):  # the last program with the terminal is gone
                    return

    def close(self):
        os.close(self.master)


class Supervisor:
    """Serves one request at a time. ``config`` comes from the host: env, workdir, home, roots, limits."""

    def __init__(self, control_in, control_out):
        self.control_in, self.control_out = control_in, control_out
        self.processes = Processes([control_in, control_out])
        self.shell = self.terminal = None
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
            watched = self.config.get("watch_memory_bytes")
            ready, _, _ = select.select([self.control_in, self.processes.wake_r], [], [], 0.2 if watched else None)
            if watched:
                self.processes.keep_below(watched)
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
            import tarfile  # noqa: F401  now, before an agent that is root could replace the file

    # -- commands ----------------------------------------------------------------------------------------------
    def ensure_shell(self, cwd=None):
        if self.shell and self.processes.running(self.shell.pid):
            return
        self.drop_shell()
        cwds = [path for path in (cwd, self.config["workdir"], "/") if path]  # an agent may have removed the first
        try:
            self.shell = Shell(self.processes, self.config["env"], cwds)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            self.processes.kill_all()  # the agent used up its processes; only it is to blame
            self.shell = Shell(self.processes, self.config["env"], cwds)

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

    def do_type(self, request, keys):
        self.processes.reap()
        if self.terminal and not self.processes.running(self.terminal.pid):
            self.drop_terminal()
        if not self.terminal:
            cwds = [self.config["workdir"], "/"]
            self.terminal = Terminal(self.processes, self.config["env"], cwds)
        capture = Capture(request["max_output_bytes"])
        self.terminal.type(keys, request["wait_s"], capture, self.control_in)
        return {}, capture.value()

    def drop_terminal(self):
        if self.terminal:
            self.processes.statuses.pop(self.terminal.pid, None)
            self.terminal.close()
            self.terminal = None

    def do_run(self, request, _):
        self.processes.reap()
        spared = set(list_processes())
        out, out_w = os.pipe()
        err, err_w = os.pipe()
        null = os.open("/dev/null", os.O_RDWR)
        env = {**self.config["env"], **request["env"]}
        try:
            pid = self.processes.spawn(request["argv"], env, [request["cwd"]], {0: null, 1: out_w, 2: err_w})
        except OSError:
            os.close(out)
            os.close(err)
            raise
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

    def do_clear(self, request, _):
        found = [entry for path in request["paths"] for entry in clear(path)]
        return {"found": [path.encode("utf-8", "replace").decode() for path in found[:100]]}, b""

    def do_find(self, request, _):
        roots = request["below"] or [root for root, _ in self.config["roots"]]
        return {}, json.dumps(find(roots, set(request["names"]))).encode()

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
        self.drop_terminal()
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
            self.processes.keep_below(self.config["watch_memory_bytes"])
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
        os._exit(0)


if __name__ == "__main__":
    main()
