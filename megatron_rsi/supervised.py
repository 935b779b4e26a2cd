"""Supervised training, of the base and in RSR: next-token loss on the masked tokens, with checkpoints on the way."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from . import batch as packing
from . import checkpoint
from .batch import PackedBatch
from .policy import Outputs, Policy

Draw = Callable[[int], Sequence[packing.Sample]]
Report = Callable[[int, dict[str, float]], None]


def next_token_loss(num_tokens: float) -> Callable[[Outputs, PackedBatch], tuple[Tensor, dict[str, Tensor]]]:
    """Sum of -weight log p over masked tokens, divided by the global number of them."""

    def loss(outputs: Outputs, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.logprob is not None
        nll = -(outputs.logprob * batch.weights).sum() / num_tokens
        return nll, {"nll": nll.detach()}

    return loss


def fit(
    policy: Policy, draw: Draw, num_steps: int, rate: Callable[[int], float], folder: Path, save_every: int, report: Report
) -> None:
    """``num_steps`` steps on ``draw(step)``, the sequences of a step over all ranks, at the learning rate ``rate(step)``.

    Both must be functions of the step alone: training goes on from the last checkpoint in ``folder`` after a crash, and
    gives the same weights. :func:`clear` removes the checkpoints once the result is exported.
    """
    world = policy.world
    for step in range(_resume(policy, folder), num_steps):
        sequences = draw(step)
        own = packing.split_dp(sequences, world.dp)[world.dp_rank]
        num_tokens = float(sum(sum(s.mask) for s in sequences))
        report(step + 1, policy.train_step([packing.make_batch(own)], next_token_loss(num_tokens), rate(step)))
        if (step + 1) % save_every == 0 and step + 1 < num_steps:
            checkpoint.save(folder, world, step + 1, {"policy": policy.state_dict(), "step": step + 1}, keep=1)


def _resume(policy: Policy, folder: Path) -> int:
    path = checkpoint.latest(folder)
    if path is None:
        return 0
    state = checkpoint.load(path, policy.world)
    policy.load_state_dict(state["policy"])
    return int(state["step"])


def clear(policy: Policy, folder: Path) -> None:
    if policy.world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    policy.world.barrier()
