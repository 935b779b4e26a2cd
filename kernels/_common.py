"""What every op shares: the optional Triton import, the choice of back end, argument checks.

Messages of a ValueError say what was wrong, the value seen, the value wanted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

triton: Any
tl: Any
try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
except ImportError:  # the CPU installation has no triton: every op then uses its torch version
    triton = None
    tl = None

IMPLS = ("auto", "triton", "torch")
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit`` where triton is installed, else the plain function, which is never launched."""
    return triton.jit(function) if triton is not None else function


def choose_impl(impl: str, tensor: Tensor) -> str:
    """Back end of one call: "triton" or "torch".

    "auto" is triton on CUDA tensors when triton is installed (float64 stays with torch), else torch.
    Raises ValueError for an unknown name and for "triton" where it cannot run.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r}: choose one of {', '.join(IMPLS)}")
    if impl == "auto":
        return "triton" if tensor.is_cuda and triton is not None and tensor.dtype != torch.float64 else "torch"
    if impl == "triton":
        if triton is None:
            raise ValueError('impl="triton" but triton is not installed: pip install triton, or use impl="torch"')
        if not tensor.is_cuda and not interpreting():
            raise ValueError(f'impl="triton" needs CUDA tensors, got {tensor.device}: use impl="torch", '
                             "or set TRITON_INTERPRET=1 before the first import to run the interpreter")
        if tensor.dtype == torch.float64:
            raise ValueError('impl="triton" computes in float32, got float64: use impl="torch"')
    return impl


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor,
                 dtypes: tuple[torch.dtype, ...]) -> None:
    """Shape, dtype and device of one argument; ``like`` is the argument that fixes the device."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: on {tensor.device}, but the first argument is on {like.device}")


def check_number(name: str, value: float, low: float, high: float = math.inf, *, low_open: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] with ``low_open``."""
    number = float(value)
    if not math.isfinite(number) or number > high or number < low or (low_open and number == low):
        bracket = "(" if low_open else "["
        raise ValueError(f"{name}={value}: must be a finite number in {bracket}{low}, {high}]")
    return number


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current CUDA device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
