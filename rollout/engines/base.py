"""The policy engine seam: token ids in, sampled ids with log-probs out, weights replaced in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import EngineError
from ..records import Completion

__all__ = ["EngineError", "PolicyEngine", "Sampling"]


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy, and then log-probs are those at temperature 1. ``seed`` names the random stream.

    The draw of a token depends on the seed, the position and the distribution alone, never on what else is in the batch.
    """

    temperature: float = 1.0
    max_new_tokens: int = 48
    stop_ids: tuple[int, ...] = ()
    seed: str = "0"

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")


class PolicyEngine(Protocol):
    """One contract for every engine. ``session`` names a trial, whose prefix stays cached until ``release``."""

    context: int
    weight_version: int

    async def generate(self, ids: list[int], sampling: Sampling, session: str) -> Completion: ...

    def release(self, session: str) -> None: ...

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes Hugging Face named tensors, of each layer q, k, v and gate, up in turn.

        Every completion after it carries ``version``; cached prefixes are dropped.
        """

    def sleep(self) -> None:
        """Frees the KV cache while the trainer works."""

    def wake(self) -> None: ...

    def close(self) -> None: ...
