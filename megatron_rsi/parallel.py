"""The processes of one run: which device, which backend, and who belongs to which parallel group.

Ranks are laid out as megatron-core does: tensor parallel fastest, then data parallel, then pipeline parallel. All ranks
of one tensor x pipeline group hold one model together and see the same data; ``dp`` such groups share the work.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Said on every import and every rank; what is not installed shows in `doctor`.
warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", module=r"megatron\.")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def choose_device(device: str = "auto") -> tuple[torch.device, str]:
    """The device of this process and its torch.distributed backend: ``cuda`` with nccl, or ``cpu`` with gloo.

    The only place where this is decided. Raises ValueError for an unknown name or for ``cuda`` without a GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}, expected 'auto', 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' but torch sees no GPU: install a CUDA build of torch or set world.device")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "nccl"


@dataclass(frozen=True)
class World:
    """Sizes and this process's place. Make it with :meth:`init`, end it with :meth:`close`.

    >>> world = World.init(tp=1, pp=1, device="cpu")      # alone, or started by torchrun
    >>> world.dp, world.is_last_stage
    (1, True)
    """

    device: torch.device
    backend: str
    rank: int
    size: int
    tp: int
    pp: int
    dp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int

    @classmethod
    def init(
        cls,
        tp: int = 1,
        pp: int = 1,
        device: str = "auto",
        *,
        threads: int = 1,
        seed: int = 0,
        timeout_s: float = 1800.0,
    ) -> World:
        """Join (or, without torchrun, form) the process group and set up megatron-core's groups.

        ``threads`` is torch's intra-op thread count on a CPU. Calling it again in one process makes new groups of
        another shape. Raises ValueError when the number of processes is not a multiple of ``tp * pp``.
        """
        torch_device, backend = choose_device(device)
        if torch_device.type == "cpu":
            torch.set_num_threads(threads)
        else:
            torch.cuda.set_device(torch_device)
        size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if tp < 1 or pp < 1 or size % (tp * pp):
            raise ValueError(
                f"{size} processes cannot be split into groups of tp*pp = {tp}*{pp} = {tp * pp}: "
                f"start a multiple of {max(tp, 1) * max(pp, 1)} processes or lower world.tp / world.pp"
            )
        if not dist.is_initialized():
            _init_process_group(backend, size, timeout_s)
        return cls._with_groups(torch_device, backend, tp, pp, seed)

    @classmethod
    def _with_groups(cls, device: torch.device, backend: str, tp: int, pp: int, seed: int) -> World:
        from megatron.core import parallel_state as mpu

        from . import cpu_adaptation

        if device.type == "cpu":
            cpu_adaptation.install()
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        seed_everything(seed)
        return cls(
            device=device,
            backend=backend,
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            tp=tp,
            pp=pp,
            dp=mpu.get_data_parallel_world_size(),
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            pp_rank=mpu.get_pipeline_model_parallel_rank(),
            dp_rank=mpu.get_data_parallel_rank(),
        )

    def close(self) -> None:
        """Leave all groups. A later :meth:`init` in the same process starts afresh."""
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---- places
    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    def group(self, name: str) -> dist.ProcessGroup | None:
        """``world`` (None), ``tp``, ``pp``, ``dp`` or ``mp`` (the tensor x pipeline group that holds one model)."""
        from megatron.core import parallel_state as mpu

        if name == "world":
            return None
        getters = {
            "tp": mpu.get_tensor_model_parallel_group,
            "pp": mpu.get_pipeline_model_parallel_group,
            "dp": mpu.get_data_parallel_group,
            "mp": mpu.get_model_parallel_group,
        }
        if name not in getters:
            raise ValueError(f"unknown group {name!r}, expected world, tp, pp, dp or mp")
        return getters[name]()

    def stage_rank(self, pp_rank: int) -> int:
        """Global rank of this rank's peer on another pipeline stage."""
        group = self.group("pp")
        assert group is not None
        return dist.get_global_rank(group, pp_rank)

    # ---- collectives
    def barrier(self) -> None:
        dist.barrier()

    def all_reduce(self, values: Mapping[str, float], op: str = "sum", group: str = "world") -> dict[str, float]:
        """Reduce floats by name. Every rank of the group must pass the same names (float64 is used on the wire)."""
        names = sorted(values)
        tensor = torch.tensor([float(values[n]) for n in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=_OPS[op], group=self.group(group))
        return dict(zip(names, tensor.tolist(), strict=True))

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """What rank ``src`` passed, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=src, device=self.device)
        return box[0]

    def all_gather_object(self, value: Any, group: str = "world") -> list[Any]:
        """What each rank of the group passed, in rank order, on every rank."""
        process_group = self.group(group)
        box: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(box, value, group=process_group)
        return box


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and Python's random; equal on all ranks, since nothing random happens inside the model."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _init_process_group(backend: str, size: int, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    if size == 1 and "RANK" not in os.environ:  # alone: no port, no file
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
