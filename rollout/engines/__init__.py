"""Policy engines. ``make_engine`` is the one place that chooses."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .base import EngineError, PolicyEngine, Sampling
from .embedded import EmbeddedEngine

__all__ = ["EmbeddedEngine", "EngineError", "PolicyEngine", "Sampling", "make_engine"]


class EngineSettings(Protocol):
    """What is read of the configuration's ``[engine]`` table."""

    @property
    def kind(self) -> str: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def context(self) -> int: ...


def make_engine(settings: EngineSettings, model: dict[str, Any], device: torch.device | str = "cpu") -> PolicyEngine:
    """``model`` is the checkpoint's config.json. Raises ValueError for a kind that is not there."""
    if settings.kind == "embedded":
        return EmbeddedEngine(model, max_batch=settings.max_batch, context=settings.context, device=device)
    raise ValueError(f"engine.kind={settings.kind!r} is not supported yet; use 'embedded'")
