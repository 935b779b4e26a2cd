"""Exact peak of the bytes that torch operators allocate: the memory figures of tests and benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators return while the mode is active, until they are freed.

    peak: the most bytes alive at once. largest: the largest single storage. Storages that existed before do not count,
    nor does what an operator allocates and frees inside itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {StorageWeakRef(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        self._live = {storage: size for storage, size in self._live.items() if not storage.expired()}
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := StorageWeakRef(x.untyped_storage())) not in given:
                self._live[storage] = x.untyped_storage().nbytes()
                self.largest = max(self.largest, self._live[storage])
        self.peak = max(self.peak, sum(self._live.values()))
        return out
