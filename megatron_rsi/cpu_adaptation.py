"""Lets megatron-core's CUDA-only lines run on a CPU with gloo. Nothing here is used on a GPU.

megatron.core names ``torch.cuda.current_device()``, streams, CUDA random states and ``device="cuda"`` in many modules.
Each of its modules holds its own global name ``torch``; :func:`install` rebinds that name to a proxy that answers these
few calls for the CPU and passes everything else on. ``torch`` itself stays as it is for everybody else: a global patch
would reach other libraries too and, for instance, silently break the rotary buffers of transformers.

Two checks go through methods of ``torch.Tensor`` and cannot be reached by a proxy: ``Tensor.cuda()`` when tied
embeddings are set up, and ``Tensor.type() == "torch.cuda.FloatTensor"`` in the optimizers. :func:`cuda_lookalike`
answers them while a model or an optimizer is being *built*, and only then.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")

# Imported late by megatron itself: bring them in first, else they would keep the real torch.
_LATE_MODULES = (
    "models.gpt",
    "pipeline_parallel.schedules",
    "pipeline_parallel.p2p_communication",
    "distributed.finalize_model_grads",
    "optimizer.distrib_optimizer",
    "optimizer.clip_grads",
    "tensor_parallel.random",
)
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like")


class _Stream:
    """A stream or event of a device that has none: everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    wait_stream = synchronize = record = wait = wait_event


class _CudaOnCpu(types.ModuleType):
    Stream = Event = _Stream

    @staticmethod
    def current_device() -> torch.device:
        return CPU

    @staticmethod
    def synchronize(*_: Any) -> None: ...

    @staticmethod
    def current_stream(*_: Any) -> _Stream:
        return _Stream()

    default_stream = current_stream

    @staticmethod
    def stream(_: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    @staticmethod
    def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _on_cpu(factory: Callable) -> Callable:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create


class _TorchOnCpu(types.ModuleType):
    cuda = _CudaOnCpu("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


for _name in _FACTORIES:
    setattr(_TorchOnCpu, _name, staticmethod(_on_cpu(getattr(torch, _name))))
_PROXY = _TorchOnCpu("torch")


def install() -> None:
    """Rebind ``torch`` in every loaded module of megatron.core. Safe to call again (after further imports)."""
    for name in _LATE_MODULES:
        importlib.import_module(f"megatron.core.{name}")
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "__dict__", {}).get("torch") is torch:
            module.torch = _PROXY  # type: ignore[attr-defined]
    random = sys.modules["megatron.core.tensor_parallel.random"]
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[attr-defined]


@contextlib.contextmanager
def cuda_lookalike(device: torch.device) -> Iterator[None]:
    """While a model or optimizer is built on the CPU: ``t.cuda()`` is ``t`` and ``t.type()`` reads as on a GPU."""
    if device.type != "cpu":
        yield
        return
    real_type, real_cuda = torch.Tensor.type, torch.Tensor.cuda

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type, torch.Tensor.cuda = real_type, real_cuda  # type: ignore[method-assign]
