"""An engine that answers from a function of the session and the prompt: for tests and for replays."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..records import Completion
from .base import Sampling


class ScriptedEngine:
    """``reply(session, prompt ids)`` returns the ids to answer with. Log-probs are 0: the script is certain."""

    def __init__(self, reply: Callable[[str, list[int]], list[int]], context: int = 1 << 20):
        self.reply, self.context, self.weight_version = reply, context, 0

    async def generate(self, ids: list[int], sampling: Sampling, session: str) -> Completion:
        if not 0 < len(ids) < self.context:
            raise ValueError(f"prompt of {len(ids)} tokens does not fit a context of {self.context}")
        answer = self.reply(session, ids)[: min(sampling.max_new_tokens, self.context - len(ids))]
        stops = [n for n, token in enumerate(answer) if token in sampling.stop_ids]
        answer = answer[: stops[0] + 1] if stops else answer
        finish = "stop" if answer and answer[-1] in sampling.stop_ids else "length"
        return Completion(ids=answer, logprobs=[0.0] * len(answer), finish=finish, weight_version=self.weight_version)

    def release(self, session: str) -> None: ...

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        for _ in tensors:
            pass
        self.weight_version = version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
