"""Compile our Triton kernels for a GPU that is not there, and read what the machine code uses.

A stand-in driver names the target; ``kernel.warmup`` then compiles without a launch. For NVIDIA targets ``cuobjdump``
and ``nvdisasm`` from the triton wheel give registers, stack, shared memory and the instructions of the cubin.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_rsi.kernels.linear_logprob import Tile, _linear_gradient_kernel, _linear_stats_kernel, tile_for
from megatron_rsi.kernels.logprob import BLOCK_COLUMNS, _gradient_kernel, _stats_kernel
from megatron_rsi.kernels.logprob import NUM_WARPS as LOGPROB_WARPS
from megatron_rsi.kernels.ppo_loss import BLOCK_TOKENS as PPO_BLOCK
from megatron_rsi.kernels.ppo_loss import NUM_WARPS as PPO_WARPS
from megatron_rsi.kernels.ppo_loss import _ppo_kernel
from megatron_rsi.kernels.tb_gae import _BLOCK_TOKENS as GAE_BLOCK
from megatron_rsi.kernels.tb_gae import NUM_WARPS as GAE_WARPS
from megatron_rsi.kernels.tb_gae import _tb_gae_kernel

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY_BYTES = {  # the most one program may ask for
    "sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376, "gfx942": 65_536,
    "gfx950": 163_840}


class StandInDriver:
    """What Triton asks a driver while it compiles."""

    def __init__(self, name: str):
        kind, number = re.fullmatch(r"(sm_|gfx)(\w+)", name).groups()
        self.target = GPUTarget("cuda", int(number), 32) if kind == "sm_" else GPUTarget("hip", name, 64)
        self.device = list(SHARED_MEMORY_BYTES).index(name)  # Triton keeps one compiler a device: each target its own

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


class Usage(NamedTuple):
    """Of one kernel: registers a thread, shared memory and stack in bytes, instruction counts."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    wgmma: int
    tma_loads: int
    local_memory: int


def launches(target: str):
    """(name, kernel, arguments, options) of every configuration the ops launch on this target."""
    f32, i32, i64, boolean = torch.float32, torch.int32, torch.int64, torch.bool
    yield ("tb_gae", _tb_gae_kernel, [f32, f32, boolean, i32, i32, f32, f32, f32, *[0.95] * 6],
           dict(BLOCK=GAE_BLOCK, num_warps=GAE_WARPS))
    full = [f32] * 10 + [boolean] + [f32] * 4 + [8192, 18, 0.001, 0.2, 0.2, 3.0, 2.0, 0.1, 0.01, 1.0, 0.2]
    yield "ppo_loss everything", _ppo_kernel, full, dict(BLOCK=PPO_BLOCK, num_warps=PPO_WARPS)
    plain = list(full)
    for absent in (3, 4, 5, 9, 12, 20, 21):
        plain[absent] = None
    yield "ppo_loss plain", _ppo_kernel, plain, dict(BLOCK=PPO_BLOCK, num_warps=PPO_WARPS)
    for dtype in (torch.bfloat16, f32):
        for entropy in (False, True):
            label = f"{str(dtype)[6:]}{' entropy' if entropy else ''}"
            row = dict(ENTROPY=entropy, BLOCK=BLOCK_COLUMNS, num_warps=LOGPROB_WARPS)
            yield f"logprob forward {label}", _stats_kernel, [dtype, i64, f32, 8192, 151936, 0.7], row
            yield (f"logprob backward {label}", _gradient_kernel,
                   [dtype, dtype, i64, boolean, f32, f32, 8192, 151936, 0.7], row)
            tile: Tile = tile_for(dtype, SHARED_MEMORY_BYTES[target])
            descriptors = [TensorDescriptor.from_tensor(torch.empty(1024, 5120, dtype=dtype), [size, tile.depth])
                           for size in (tile.rows, tile.columns)]
            options = dict(ENTROPY=entropy, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
                           num_warps=tile.num_warps, num_stages=tile.num_stages)
            yield (f"linear_logprob forward {label}", _linear_stats_kernel,
                   [*descriptors, i64, f32, 8192, 151936, 5120, 75, 0.7], options)
            yield (f"linear_logprob backward {label}", _linear_gradient_kernel,
                   [*descriptors, i64, f32, f32, dtype, 8192, 16384, 32768, 16384, 5120, 0.7], options)


def compile_all(target: str):
    """{name: compiled kernel} of every configuration for one target."""
    driver.set_active(StandInDriver(target))
    return {name: kernel.warmup(*arguments, grid=(1,), **options)
            for name, kernel, arguments, options in launches(target)}


def usage(compiled) -> Usage:
    """Read the cubin of one compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources = subprocess.run([TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True,
                                   text=True, check=True).stdout
        code = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", resources)[1]) for key in ("REG", "STACK"))
    counts = [len(re.findall(pattern, code)) for pattern in (r"\bHGMMA", r"\bUTMALDG", r"\b(?:LDL|STL)\b")]
    return Usage(registers, compiled.metadata.shared, stack, *counts)
