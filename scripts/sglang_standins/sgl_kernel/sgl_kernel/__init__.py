"""Names that SGLang imports from its compiled kernels. With the torch back ends on a CPU none of them is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not built for this machine")

    return missing
