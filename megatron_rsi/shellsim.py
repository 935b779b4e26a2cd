"""A dictionary that answers like bash for the few commands of the base corpus.

Only the synthetic corpus uses it: millions of tokens of demonstrations need no real shell. Every rollout and every
evaluation runs real bash, and a test compares this file with real bash command by command.
"""

from __future__ import annotations

import hashlib
import re

SUBSTITUTION = re.compile(r"'s/ (\S+)/ (\S+)/'")  # the one quoted argument that the sessions use
MISSING = "No such file or directory"


class ShellSim:
    """Files of one work folder. ``run`` returns (stdout, stderr message or "", exit code)."""

    def __init__(self, files: dict[str, str], folders: list[str]):
        self.files, self.folders = dict(files), set(folders)
        self.modes: dict[str, str] = {}

    def run(self, command: str) -> tuple[str, str, int]:
        match = re.fullmatch(r"(.*?) (>>?) (\S+)", command)
        body, operator, target = match.groups() if match else (command, "", "")
        out, err, code = self._run(*SUBSTITUTION.sub(r"\1|\2", body).split(" "))
        if operator:
            before = self.files.get(target, "") if operator == ">>" else ""
            self.files[target], out = before + out, ""
        return out, err, code

    def _run(self, name: str, *args: str) -> tuple[str, str, int]:
        method = getattr(self, f"_{name}", None)
        if method is None:
            return "", "command not found", 127
        return method(*args)

    def _read(self, path: str) -> str | None:
        return self.files.get(path)

    def _echo(self, *words: str) -> tuple[str, str, int]:
        return " ".join(words) + "\n", "", 0

    def _pwd(self) -> tuple[str, str, int]:
        return "/app\n", "", 0

    def _cat(self, path: str) -> tuple[str, str, int]:
        text = self._read(path)
        return (text, "", 0) if text is not None else ("", MISSING, 1)

    def _sort(self, *args: str) -> tuple[str, str, int]:
        text = self._read(args[-1])
        if text is None:
            return "", MISSING, 2
        return "".join(sorted(text.splitlines(True), reverse=args[0] == "-r")), "", 0

    def _grep(self, *args: str) -> tuple[str, str, int]:
        pattern, path = args[-2:]
        text = self._read(path)
        if text is None:
            return "", MISSING, 2
        lines = [line for line in text.splitlines() if pattern in line]
        out = f"{len(lines)}\n" if args[0] == "-c" else "".join(line + "\n" for line in lines)
        return out, "", 0 if lines else 1

    def _sed(self, *args: str) -> tuple[str, str, int]:
        path, (old, new) = args[-1], args[-2].split("|")
        text = self._read(path)
        if text is None:
            return "", MISSING, 2
        changed = "".join(line.replace(f" {old}", f" {new}", 1) for line in text.splitlines(True))
        if args[0] != "-i":
            return changed, "", 0
        self.files[path] = changed
        return "", "", 0

    def _cp(self, source: str, target: str) -> tuple[str, str, int]:
        text = self._read(source)
        if text is None:
            return "", MISSING, 1
        self.files[f"{target}/{source}" if target in self.folders else target] = text
        return "", "", 0

    def _mv(self, source: str, target: str) -> tuple[str, str, int]:
        result = self._cp(source, target)
        if result[2] == 0:
            del self.files[source]
        return result

    def _rm(self, path: str) -> tuple[str, str, int]:
        return ("", "", 0) if self.files.pop(path, None) is not None else ("", MISSING, 1)

    def _chmod(self, mode: str, path: str) -> tuple[str, str, int]:
        if path not in self.files:
            return "", MISSING, 1
        self.modes[path] = mode
        return "", "", 0

    def _tar(self, mode: str, archive: str, folder: str) -> tuple[str, str, int]:
        if mode == "tf":
            return "", "Exiting now", 2
        if folder not in self.folders:
            return "", "Exiting with failure status due to previous errors", 2
        self.files[archive] = f"tar of {folder}\n"
        return "", "", 0

    def _sha256sum(self, path: str) -> tuple[str, str, int]:
        return self._digest("sha256", path)

    def _md5sum(self, path: str) -> tuple[str, str, int]:
        return self._digest("md5", path)

    def _digest(self, name: str, path: str) -> tuple[str, str, int]:
        text = self._read(path)
        if text is None:
            return "", MISSING, 1
        return f"{hashlib.new(name, text.encode()).hexdigest()}  {path}\n", "", 0

    def _bash(self, path: str) -> tuple[str, str, int]:
        """Runs the two-line scripts of the ``fix`` family: a script that echoes, and its test."""
        text = self._read(path)
        if text is None:
            return "", MISSING, 127
        if path.endswith(".sh"):
            return self._run(*text.strip().split(" "))
        name, wanted = re.search(r'bash (\S+)\)" = "([^"]+)"', text).groups()  # type: ignore[union-attr]
        out, _, _ = self._bash(name)
        message = re.search(r"echo (.*)\n", text).group(1)  # type: ignore[union-attr]
        return ("", "", 0) if out.strip() == wanted else (message + "\n", "", 0)
