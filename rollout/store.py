"""Durable JSON lines: a record is on disk, whole, before it counts.

Each writer appends to its own file ``<name>.<writer>.jsonl``, or ``<name>.jsonl`` where there is only one, so many ranks may
share one folder. A line that a crash cut
short was never counted and is removed when the file is opened again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

R = TypeVar("R", bound=msgspec.Struct)


class Store(Generic[R]):
    """Append-only records of one type in ``folder``. ``read`` merges the files of all writers.

    >>> import tempfile; from .records import Review
    >>> store = Store(tempfile.mkdtemp(), "reviews", Review)
    >>> store.append(Review(runbook_id="r", accepted=True, source="model")); [r.runbook_id for r in store.read()]
    ['r']
    """

    def __init__(self, folder: Path | str, name: str, record: type[R], writer: int | None = 0):
        self.folder, self.name = Path(folder), name
        self.path = self.folder / (f"{name}.jsonl" if writer is None else f"{name}.{writer}.jsonl")
        self._encoder, self._decoder = msgspec.json.Encoder(), msgspec.json.Decoder(record)
        self._file: int | None = None

    def _open(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        drop_torn_line(self.path)
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, record: R) -> None:
        """One write of one whole line. On a full disk the torn line is removed again and OSError raised."""
        if self._file is None:
            self._file = self._open()
        line = self._encoder.encode(record) + b"\n"
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(28, "No space left on device", str(self.path))
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None

    def read(self) -> list[R]:
        """Every whole record of every writer. A damaged line is a ValueError that names the file and the line."""
        return [record for path in store_files(self.folder, self.name) for record in self._lines(path)]

    def _lines(self, path: Path) -> Iterable[R]:
        data = path.read_bytes()
        for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
            try:
                yield self._decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(
                    f"{path} line {number} is damaged ({error}); delete that line to go on without it"
                ) from error


def store_files(folder: Path, name: str) -> list[Path]:
    """The files of all writers of a store, [] when there is none."""
    own = re.compile(re.escape(name) + r"(\.\d+)?\.jsonl")
    return sorted(p for p in folder.iterdir() if own.fullmatch(p.name)) if folder.is_dir() else []


def drop_torn_line(path: Path) -> None:
    """Cuts what follows the last newline."""
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
