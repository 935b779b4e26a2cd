"""The critic between stages: how it is inherited, how well it is calibrated, and when it may guide the actor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from .parallel import World
from .policy import ModelConfig, OptimizerConfig, Policy

LOW_VARIANCE = 1e-3  # below this Var[R], ratios by the variance mean nothing and RMSE decides instead
_HEAD = ("value_head.weight", "value_head.bias")


def build_critic(
    config: ModelConfig,
    world: World,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    optimizer: OptimizerConfig | None = None,
    megatron: Mapping[str, Any] | None = None,
) -> Policy:
    """A first critic: the actor's weights, never tied, a value head of zeros (every value is 0), a fresh optimizer.

    ``tensors`` are the actor's under Hugging Face names; its output head is ignored.
    """
    body = {name: t for name, t in _pairs(tensors) if name not in _HEAD}
    zeros = {_HEAD[0]: torch.zeros(1, config.hidden_size), _HEAD[1]: torch.zeros(1)}
    critic = Policy(config, world, optimizer, value_head=True, megatron=megatron)
    critic.load_hf(body | zeros)
    return critic


def inherit(
    config: ModelConfig,
    world: World,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    optimizer: OptimizerConfig | None = None,
    megatron: Mapping[str, Any] | None = None,
) -> Policy:
    """The critic of the stage before: its weights with its value head, a fresh optimizer (no states are carried over).

    Raises ValueError when the source holds no value head: starting from a silent zero head would pass for inheritance.
    """
    given = dict(_pairs(tensors))
    missing = [name for name in _HEAD if name not in given]
    if missing:
        raise ValueError(
            f"the critic to inherit lacks {', '.join(missing)}: it is an actor's or a damaged checkpoint; "
            "use build_critic to start a new value head"
        )
    critic = Policy(config, world, optimizer, value_head=True, megatron=megatron)
    critic.load_hf(given)
    return critic


def reset_value_head(critic: Policy) -> None:
    """Set the value head to zeros (the one re-initialisation allowed when calibration keeps failing)."""
    tensors = {name: t.clone() for name, t in critic.hf_tensors()}
    critic.load_hf(tensors | {name: torch.zeros_like(tensors[name]) for name in _HEAD})


def _pairs(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """What a critic must reach before the actor may move. The limits of the last three are upper ones."""

    min_trials: int = 64
    ev: float = 0.2
    r2: float = 0.0
    bias: float = 0.05
    ece: float = 0.10
    rmse: float = 0.10


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """How values V predict returns R, over n pairs (first action tokens of turns or trials).

    ``ev`` = 1 - Var[R - V] / Var[R] and ``r2`` = 1 - E[(R - V)^2] / Var[R], both None when Var[R] is below 1e-3;
    ``bias`` = E[R - V]; ``ece`` = sum over bins of equal mass of (bin size / n) |mean R - mean V|; ``rmse`` = root of
    E[(R - V)^2]; ``variance`` = Var[R].
    """

    num_trials: int
    num_pairs: int
    ev: float | None
    r2: float | None
    bias: float
    ece: float
    rmse: float
    variance: float


def calibration(
    returns: Tensor | np.ndarray, values: Tensor | np.ndarray, *, num_trials: int | None = None, num_bins: int = 10
) -> Calibration:
    """Calibration of paired returns and values, each float[n]. ``num_trials`` defaults to n.

    Bins hold equal numbers of pairs in the order of the values; pairs of equal value may be shared between bins in any
    way, so each bin of a constant critic gets the mean return of all (no noise from their order).
    Raises ValueError when nothing is given, lengths differ or an entry is not finite.
    """
    target, guess = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (returns, values))
    if len(target) != len(guess) or not len(target):
        raise ValueError(
            f"calibration needs as many returns as values and at least one, got {len(target)}, {len(guess)}"
        )
    if not (np.isfinite(target).all() and np.isfinite(guess).all()):
        raise ValueError("calibration needs finite returns and values")
    error = target - guess
    variance = float(target.var())
    informative = variance >= LOW_VARIANCE
    return Calibration(
        num_trials=len(target) if num_trials is None else num_trials,
        num_pairs=len(target),
        ev=1 - float(error.var()) / variance if informative else None,
        r2=1 - float((error**2).mean()) / variance if informative else None,
        bias=float(error.mean()),
        ece=_ece(target, guess, num_bins),
        rmse=float((error**2).mean() ** 0.5),
        variance=variance,
    )


def _ece(target: np.ndarray, guess: np.ndarray, num_bins: int) -> float:
    order = np.argsort(guess, kind="stable")
    guess, target = guess[order], target[order]
    _, group, counts = np.unique(guess, return_inverse=True, return_counts=True)
    target = (np.bincount(group, weights=target) / counts)[group]  # ties share their mean return
    bins = np.array_split(np.arange(len(guess)), min(num_bins, len(guess)))
    return float(sum(abs(target[b].sum() - guess[b].sum()) for b in bins) / len(guess))


@dataclass(frozen=True)
class GateResult:
    """``reasons`` names each threshold that was missed, with both numbers; empty when ``passed``."""

    passed: bool
    reasons: tuple[str, ...]


def gate(report: Calibration, thresholds: Thresholds | None = None) -> GateResult:
    """Whether a critic may guide the actor. Explained variance alone is no gate: it ignores a constant offset and
    explodes when returns hardly vary; in that case RMSE decides alone."""
    limits = thresholds or Thresholds()
    reasons = []
    if report.num_trials < limits.min_trials:
        reasons.append(f"{report.num_trials} trials, needs {limits.min_trials}")
    if report.ev is None or report.r2 is None:
        if report.rmse > limits.rmse:
            reasons.append(f"rmse {report.rmse:.3f} above {limits.rmse} (returns hardly vary)")
        return GateResult(not reasons, tuple(reasons))
    if report.ev < limits.ev:
        reasons.append(f"ev {report.ev:.3f} below {limits.ev}")
    if report.r2 < limits.r2:
        reasons.append(f"r2 {report.r2:.3f} below {limits.r2}")
    if abs(report.bias) > limits.bias:
        reasons.append(f"|bias| {abs(report.bias):.3f} above {limits.bias}")
    if report.ece > limits.ece:
        reasons.append(f"ece {report.ece:.3f} above {limits.ece}")
    return GateResult(not reasons, tuple(reasons))
