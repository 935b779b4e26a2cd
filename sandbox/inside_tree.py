"""Inside a sandbox: emptying, saving and restoring the writable tree. Second part of the supervisor's source."""

import errno
import os


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


def clear(path):
    """Make ``path`` an empty directory, whatever an agent put there or above it. Returns what was in the way."""
    found, parts = [], path.strip("/").split("/")
    for number in range(1, len(parts) + 1):
        prefix = "/" + "/".join(parts[:number])
        if os.path.islink(prefix) or not os.path.isdir(prefix):
            if os.path.lexists(prefix):
                found.append(prefix)
                os.unlink(prefix)
            os.mkdir(prefix)
        os.chmod(prefix, 0o755)
    found += [os.path.join(path, name) for name in os.listdir(path)]
    wipe(path, 0o755)
    return found


def find(roots, names, most=200_000):
    """Path -> kind of everything below ``roots`` that is called one of ``names``, directories aside.

    Looks at ``most`` entries and follows no link to a directory. Kinds: file, program (executable), special, and
    link (to a file of the system, which is nobody's work).
    """
    found, waiting = {}, list(roots)
    while waiting and most > 0:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    most -= 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.name in names:
                        found[entry.path] = kind_of(entry)
        except OSError:
            continue  # not readable, too deep, or gone
    return found


def kind_of(entry):
    if entry.is_symlink() and os.path.realpath(entry.path).startswith(("/usr/", "/bin/", "/lib")):
        return "link"
    if not entry.is_file():
        return "special"
    return "program" if os.access(entry.path, os.X_OK) else "file"


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
