"""One PPO update: trajectories to scored mini-batches, TB-GAE, then epochs on critic and actor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import batch as packing
from .batch import PackedBatch
from .critic import Calibration, calibration
from .kernels import ppo_loss, tb_gae
from .parallel import World
from .policy import Outputs, Policy
from .settings import Rpr

Minibatch = list[PackedBatch]  # this rank's micro-batches of one optimizer step


@dataclass
class Experience:
    """This rank's share of one round of trajectories, scored before any update of it."""

    minibatches: list[Minibatch]
    num_tokens: list[float]  # global number of action tokens of each mini-batch
    num_dropped: int

    @property
    def batches(self) -> list[PackedBatch]:
        return [b for minibatch in self.minibatches for b in minibatch]

    def replace(self, batches: Sequence[PackedBatch]) -> None:
        remaining = iter(batches)
        self.minibatches = [[next(remaining) for _ in minibatch] for minibatch in self.minibatches]


def make_experience(
    samples: Sequence[packing.Sample], world: World, settings: Rpr, max_length: int, key: str
) -> Experience:
    """Deals trajectories into mini-batches of about ``minibatch_tokens`` tokens over all ranks; all ranks pass the same."""
    order = [s for s in samples if s.num_tokens <= max_length]
    random.Random(key).shuffle(order)
    groups: list[list[packing.Sample]] = []
    for sample in order:
        if not groups or sum(s.num_tokens for s in groups[-1]) + sample.num_tokens > settings.minibatch_tokens:
            groups.append([])
        groups[-1].append(sample)
    shares = [packing.split_dp(group, world.dp)[world.dp_rank] for group in groups]
    limit = max(settings.minibatch_tokens, max_length)
    minibatches = [packing.pack(share, limit) or [PackedBatch.empty()] for share in shares]
    num_tokens = [float(sum(sum(s.mask) for s in group)) for group in groups]
    return Experience(minibatches, num_tokens, len(samples) - len(order))


def score(experience: Experience, critic: Policy, settings: Rpr, lambda_u: float, actor: Policy | None = None) -> None:
    """Adds values, advantages and returns, and with ``actor`` its log-probs at the sampling temperature."""
    batches = experience.batches
    values = critic.values(batches)
    old: Sequence[Any] = actor.logprobs(batches, settings.temperature) if actor is not None else [None] * len(batches)
    scored = []
    for batch, value, logprobs in zip(batches, values, old, strict=True):
        advantages, returns = tb_gae(
            value, batch.rewards, batch.mask, batch.turn_ids, batch.cu_seqlens, gamma_u=settings.gamma_u,
            lambda_u=lambda_u, gamma_w=settings.gamma_w, lambda_w=settings.lambda_w,
        )  # fmt: skip
        scored.append(batch.with_(values=value, advantages=advantages, returns=returns, old_logprobs=logprobs))
    experience.replace(scored)


def engine_gap(experience: Experience, world: World) -> dict[str, float]:
    """How far the trainer's log-probs of the sampled tokens are from the engine's before any update; d = trainer - engine.

    ``engine_gap`` mean |d|, ``engine_gap_p99`` its 99th percentile, ``engine_k3`` the mean of e^d - 1 - d, which estimates
    KL(engine || trainer) and is 0 only where both agree on every token. Empty without tokens.
    """
    own = [(_of(b.old_logprobs) - b.engine_logprobs)[b.mask].numpy() for b in experience.batches]
    gap = np.concatenate(world.all_gather_object(np.concatenate([np.zeros(0, np.float32), *own]), group="dp"))
    if not len(gap):
        return {}
    gap = gap.astype(np.float64)
    return {
        "engine_gap": float(np.abs(gap).mean()),
        "engine_gap_p99": float(np.quantile(np.abs(gap), 0.99)),
        "engine_k3": float((np.expm1(gap) - gap).mean()),
    }


def whiten(experience: Experience, world: World) -> None:
    batches = experience.batches
    white = packing.whiten([_of(b.advantages) for b in batches], [b.mask for b in batches], world)
    experience.replace([b.with_(advantages=a) for b, a in zip(batches, white, strict=True)])


def _of(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def first_action_tokens(batch: PackedBatch) -> Tensor:
    """int64[N]: where each turn's first sampled token lies."""
    index = batch.action_index
    if not len(index):
        return index
    sequence, turn = batch.sequence_index[index], batch.turn_ids[index]
    new = torch.ones(len(index), dtype=torch.bool)
    new[1:] = (sequence[1:] != sequence[:-1]) | (turn[1:] != turn[:-1])
    return index[new]


def calibrate(experience: Experience, world: World) -> Calibration | None:
    """How the critic, as it is, predicts these returns, at the first action token of every turn. None without data."""
    returns, values, trials = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)], 0
    for batch in experience.batches:
        first = first_action_tokens(batch)
        returns.append(_of(batch.returns)[first].numpy())
        values.append(_of(batch.values)[first].numpy())
        trials += batch.num_sequences if len(first) else 0
    parts = world.all_gather_object((np.concatenate(returns), np.concatenate(values), trials), group="dp")
    all_returns, all_values = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    if not len(all_returns):
        return None
    return calibration(all_returns, all_values, num_trials=sum(p[2] for p in parts))


def fit_critic(
    experience: Experience, critic: Policy, settings: Rpr, lr: float, epochs: int, key: str
) -> dict[str, float]:
    """Clipped value regression on the returns. Metrics of the last epoch."""
    metrics: dict[str, float] = {}
    for epoch in range(epochs):
        metrics = {}
        for n in _order(experience, f"{key}:critic:{epoch}"):
            total = experience.num_tokens[n]

            def loss(outputs: Outputs, batch: PackedBatch, total: float = total) -> tuple[Tensor, dict[str, Tensor]]:
                return ppo_loss(
                    None, mask=batch.mask, values=outputs.values, old_values=batch.values, returns=batch.returns,
                    num_tokens_global=total, value_clip=settings.value_clip, weights=batch.weights,
                )  # fmt: skip

            _merge(metrics, critic.train_step(experience.minibatches[n], loss, lr))
    return metrics


def improve_actor(experience: Experience, actor: Policy, settings: Rpr, lr: float, key: str) -> dict[str, float]:
    """PPO epochs on the actor; ends early once the mean KL of an epoch passes ``kl_stop``. Metrics of the last epoch."""
    metrics: dict[str, float] = {}
    for epoch in range(settings.epochs):
        metrics = {"epochs": epoch + 1.0}
        for n in _order(experience, f"{key}:actor:{epoch}"):
            total = experience.num_tokens[n]

            def loss(outputs: Outputs, batch: PackedBatch, total: float = total) -> tuple[Tensor, dict[str, Tensor]]:
                return ppo_loss(
                    outputs.logprob, batch.old_logprobs, batch.advantages, batch.mask, num_tokens_global=total,
                    entropy=outputs.entropy, engine_logprob=batch.engine_logprobs, weights=batch.weights,
                    clip_low=settings.clip, clip_high=settings.clip_high or settings.clip, dual_clip=settings.dual_clip,
                    truncated_is=settings.truncated_is, entropy_coef=settings.entropy,
                )  # fmt: skip

            step = actor.train_step(
                experience.minibatches[n], loss, lr, temperature=settings.temperature, entropy=settings.entropy > 0
            )
            _merge(metrics, step)
        if metrics["approx_kl_sum"] / metrics["num_tokens"] > settings.kl_stop:
            break
    return metrics


def _order(experience: Experience, key: str) -> list[int]:
    order = [n for n, tokens in enumerate(experience.num_tokens) if tokens > 0]
    random.Random(key).shuffle(order)
    return order


def _merge(total: dict[str, float], step: dict[str, float]) -> None:
    """Adds up sums, keeps extremes; ``grad_norm`` and ``lr`` stay those of the last step."""
    for name, value in step.items():
        if name in ("grad_norm", "lr") or name not in total:
            total[name] = value
        elif name.endswith("_max"):
            total[name] = max(total[name], value)
        elif name.endswith("_min"):
            total[name] = min(total[name], value)
        else:
            total[name] += value
