"""A stream of weights as flat buckets of bounded size, and what the engine should report about them afterwards.

One buffer is filled again and again: it lies in shared memory on a CPU and on the device on a GPU, so only its handle
travels and the model is never held twice. A tensor larger than a bucket gets a bucket of its own size.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.multiprocessing
import torch.nn.functional as F


@dataclass(frozen=True)
class Bucket:
    """``flat`` uint8[N] holds the tensors of ``entries`` one after the other; it is valid until the next bucket is made."""

    flat: torch.Tensor
    entries: list[SimpleNamespace]
    last: bool

    def payload(self) -> str:
        """What SGLang's update_weights_from_tensor takes: a pickle of the buffer's handle, as base64."""
        strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")  # a file descriptor cannot be passed to a stranger
        try:
            pickled = io.BytesIO()
            ForkingPickler(pickled).dump({"flattened_tensor": self.flat, "metadata": self.entries})
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)
        return base64.b64encode(pickled.getbuffer()).decode()


@dataclass
class BucketBuffer:
    """Makes buckets of ``dtype`` tensors in one reused buffer on ``device``."""

    size_bytes: int
    dtype: torch.dtype
    device: torch.device
    _storage: torch.Tensor | None = field(default=None, repr=False)

    def reserve(self, num_bytes: int) -> torch.Tensor:
        if self._storage is None or self._storage.numel() < num_bytes:
            size = max(num_bytes, self.size_bytes)
            self._storage = torch.empty(size, dtype=torch.uint8, device=self.device)
            if self.device.type == "cpu":
                strategy = torch.multiprocessing.get_sharing_strategy()
                torch.multiprocessing.set_sharing_strategy("file_system")
                self._storage.share_memory_()
                torch.multiprocessing.set_sharing_strategy(strategy)
        return self._storage

    def free(self) -> None:
        self._storage = None

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]], checksums: Checksums | None = None) -> Iterator[Bucket]:
        entries: list[SimpleNamespace] = []
        used = 0
        for name, tensor in tensors:
            size = tensor.numel() * self.dtype.itemsize
            if entries and used + size > self.size_bytes:
                yield self._bucket(entries, used, last=False)
                entries, used = [], 0
            flat = self.reserve(used + size)[used : used + size]
            flat.view(self.dtype).copy_(tensor.detach().reshape(-1))
            if checksums is not None:
                checksums.add(name, flat.view(self.dtype).view(tensor.shape))
            entries.append(
                SimpleNamespace(
                    name=name, shape=tensor.shape, dtype=self.dtype, start_idx=used, end_idx=used + size, numel=size
                )
            )
            used += size
        yield self._bucket(entries, used, last=True)

    def _bucket(self, entries: list[SimpleNamespace], used: int, last: bool) -> Bucket:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # another process reads it without knowing this one's streams
        return Bucket(self.reserve(used)[:used], entries, last)


class Checksums:
    """What SGLang's weights checker must report on a CPU: 8 bytes of the sha256 of each parameter.

    The engine joins q, k, v and gate, up by rows, so their bytes follow each other and one hash takes them in turn. It fills
    the vocabulary and the inner size of the MLP up with zeros, to the multiples of ``FILLED`` (rows, columns).
    """

    FILLED = {
        "embed_tokens": (64, 1), "lm_head": (64, 1), "gate_proj": (32, 1), "up_proj": (32, 1), "down_proj": (1, 32),
    }  # fmt: skip

    JOINED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")

    def __init__(self) -> None:
        self._hashes: dict[str, hashlib._Hash] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        rows, columns = next((self.FILLED[part] for part in name.split(".") if part in self.FILLED), (1, 1))
        if tensor.dim() == 2 and (tensor.shape[0] % rows or tensor.shape[1] % columns):
            tensor = F.pad(tensor, (0, -tensor.shape[1] % columns, 0, -tensor.shape[0] % rows))
        joined = ".".join(self.JOINED.get(part, part) for part in name.split("."))
        self._hashes.setdefault(joined, hashlib.sha256()).update(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def expected(self) -> dict[str, str]:
        return {name: digest.hexdigest()[:16] for name, digest in self._hashes.items()}


class Snapshot:
    """The buckets of the current weights on disk, for an engine that has to be started again.

    A new set is complete before it replaces the old one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._number = folder, 0
        self._current: list[tuple[Path, list[SimpleNamespace]]] = []
        self._next: list[tuple[Path, list[SimpleNamespace]]] = []

    def __bool__(self) -> bool:
        return bool(self._current)

    def add(self, bucket: Bucket) -> None:
        self._number += 1
        path = self.folder / f"bucket_{self._number}"
        bucket.flat.cpu().numpy().tofile(path)
        self._next.append((path, bucket.entries))

    def drop_next(self) -> None:
        self._delete(self._next)
        self._next = []

    def adopt_next(self) -> None:
        old, self._current, self._next = self._current, self._next, []
        self._delete(old)

    def close(self) -> None:
        self._delete(self._current + self._next)
        self._current, self._next = [], []

    @staticmethod
    def _delete(files: list[tuple[Path, list[SimpleNamespace]]]) -> None:
        for path, _ in files:
            path.unlink(missing_ok=True)

    def read(self, buffer: BucketBuffer) -> Iterator[Bucket]:
        for number, (path, entries) in enumerate(self._current, start=1):
            used = entries[-1].end_idx
            stored = torch.from_file(str(path), shared=False, size=used, dtype=torch.uint8)
            buffer.reserve(used)[:used].copy_(stored)
            yield buffer._bucket(entries, used, last=number == len(self._current))
