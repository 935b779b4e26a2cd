"""Policy engines. ``make_engine`` is the one place that chooses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from .base import EngineError, PolicyEngine, Sampling
from .embedded import EmbeddedEngine

if TYPE_CHECKING:
    from .sglang import SGLangSettings

__all__ = ["EmbeddedEngine", "EngineError", "PolicyEngine", "Sampling", "make_engine"]


class EngineSettings(Protocol):
    """What is read of the configuration's ``[engine]`` table."""

    @property
    def kind(self) -> str: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def context(self) -> int: ...


def make_engine(
    settings: EngineSettings, model: dict[str, Any], device: torch.device | str = "cpu", *, folder: Path | str = ".",
    options: Mapping[str, Any] | None = None, rank: int = 0,
) -> PolicyEngine:  # fmt: skip
    """``model`` is the checkpoint's config.json. Raises ValueError for a kind that is not there.

    SGLang works in ``folder`` and takes ``options``, arguments of its server by name. ``rank`` chooses among attached servers.
    """
    if settings.kind == "embedded":
        return EmbeddedEngine(model, max_batch=settings.max_batch, context=settings.context, device=device)
    if settings.kind == "sglang":
        from .sglang import SGLangEngine  # needs an HTTP client, which the embedded engine does not

        return SGLangEngine(cast("SGLangSettings", settings), model, device, Path(folder), options, rank)
    raise ValueError(f"engine.kind={settings.kind!r} is not supported; use 'embedded' or 'sglang'")
