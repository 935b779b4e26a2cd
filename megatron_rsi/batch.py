"""Packed batches: trajectories laid end to end in one stream of tokens, and their split over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from .parallel import World
from .rollout.records import Trajectory

Item = TypeVar("Item")


@dataclass(frozen=True)
class PackedBatch:
    """S sequences packed into T tokens. All tensors but ``cu_seqlens`` are [T]; ``mask`` marks sampled tokens.

    Two sequences, 3 and 2 tokens long, of which the last two and the last one were sampled::

        tokens      10 11 12 | 20 21      log-prob of 11 is predicted at 10, of 12 at 11, of 21 at 20;
        mask         0  1  1 |  0  1      12 is never a predictor of 20
        cu_seqlens   0         3      5
        positions    0  1  2 |  0  1

    ``rewards`` holds each trajectory's reward at its last action token. ``values`` are read at the predicting hidden
    state but stored at the predicted token, like ``old_logprobs``, ``advantages`` and ``returns``: 0 where mask is 0.
    Raises ValueError for tensors of unequal length, bad bounds, or a sequence whose first token claims to be sampled.
    """

    tokens: Tensor  # int64[T]
    cu_seqlens: Tensor  # int32[S+1]
    mask: Tensor  # bool[T]
    turn_ids: Tensor  # int32[T]
    rewards: Tensor  # float32[T]
    engine_logprobs: Tensor  # float32[T], 0 where mask is 0
    weights: Tensor  # float32[T], weight of the token's trajectory in the loss
    sequence_ids: tuple[str, ...] = ()
    old_logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    _cache: dict = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        size, bounds = self.tokens.shape[0], self.cu_seqlens.tolist()
        for f in fields(self):
            tensor = getattr(self, f.name)
            if isinstance(tensor, Tensor) and f.name != "cu_seqlens" and tensor.shape != (size,):
                raise ValueError(f"batch.{f.name} has shape {tuple(tensor.shape)} but there are {size} tokens")
        if bounds[0] != 0 or bounds[-1] != size or any(b <= a for a, b in zip(bounds, bounds[1:], strict=False)):
            raise ValueError(f"cu_seqlens must rise from 0 to {size} with no empty sequence, got {bounds}")
        if self.sequence_ids and len(self.sequence_ids) != self.num_sequences:
            raise ValueError(f"{len(self.sequence_ids)} sequence ids for {self.num_sequences} sequences")
        first = self.mask[self.cu_seqlens[:-1].long()]
        if bool(first.any()):
            where = int(first.nonzero()[0])
            raise ValueError(f"sequence {where} begins with a sampled token: nothing precedes it to predict it")

    # ---- sizes and derived tensors
    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_action_tokens(self) -> int:
        return self.action_index.shape[0]

    @property
    def action_index(self) -> Tensor:
        """int64[A], where the sampled tokens lie. Token ``n`` is predicted by the hidden state at ``n - 1``."""
        if "action_index" not in self._cache:
            self._cache["action_index"] = self.mask.nonzero().squeeze(1)
        return self._cache["action_index"]

    @property
    def positions(self) -> Tensor:
        """int64[T], position of each token in its sequence."""
        starts = self.cu_seqlens[:-1].long()
        return torch.arange(self.num_tokens) - torch.repeat_interleave(starts, self.cu_seqlens.long().diff())

    @property
    def sequence_index(self) -> Tensor:
        """int64[T], number of the sequence each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.cu_seqlens.long().diff())

    def with_(self, **tensors: Tensor | None) -> PackedBatch:
        """A copy with some tensors replaced; shapes are checked again."""
        return replace(self, **tensors, _cache=self._cache if "mask" not in tensors else {})  # type: ignore[arg-type]

    @classmethod
    def empty(cls) -> PackedBatch:
        """One unsampled token: runs through model and loss, contributes nothing. Evens out micro-batch counts."""
        zero = torch.zeros(1)
        return cls(
            tokens=torch.zeros(1, dtype=torch.int64),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            mask=torch.zeros(1, dtype=torch.bool),
            turn_ids=torch.zeros(1, dtype=torch.int32),
            rewards=zero,
            engine_logprobs=zero,
            weights=zero,
            sequence_ids=("",),
            old_logprobs=zero,
            values=zero,
            advantages=zero,
            returns=zero,
        )


@dataclass(frozen=True)
class Sample:
    """One sequence on its way into a batch. Lists are as long as ``tokens``."""

    sequence_id: str
    tokens: list[int]
    mask: list[bool]
    turn_ids: list[int]
    logprobs: list[float]
    reward: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mask", "turn_ids", "logprobs"):
            if len(getattr(self, name)) != len(self.tokens):
                raise ValueError(
                    f"{self.sequence_id}: {len(self.tokens)} tokens but {len(getattr(self, name))} entries in {name}"
                )

    @classmethod
    def of(cls, trajectory: Trajectory, reward: float = 0.0, weight: float = 1.0) -> Sample:
        return cls(
            trajectory.attempt_id,
            trajectory.tokens,
            trajectory.mask,
            trajectory.turn_ids,
            trajectory.logprobs,
            reward,
            weight,
        )

    @classmethod
    def plain(cls, sequence_id: str, tokens: list[int], mask: list[bool]) -> Sample:
        """One that nobody rolled out: no turns, no log-probs, no reward."""
        zeros = [0] * len(tokens)
        return cls(sequence_id, tokens, mask, zeros, [0.0] * len(tokens))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def make_batch(sequences: Sequence[Sample]) -> PackedBatch:
    """Lay sequences end to end. The reward goes to the last action token; a sequence without one is refused."""
    if not sequences:
        return PackedBatch.empty()
    rewards: list[float] = []
    for s in sequences:
        if True not in s.mask:
            raise ValueError(f"{s.sequence_id} has no sampled token: leave it out of the batch")
        own = [0.0] * s.num_tokens
        own[len(s.mask) - 1 - s.mask[::-1].index(True)] = s.reward
        rewards += own
    bounds = torch.tensor([0] + [s.num_tokens for s in sequences]).cumsum(0)

    def join(read: Callable[[Sample], list], dtype: torch.dtype) -> Tensor:
        return torch.tensor([x for s in sequences for x in read(s)], dtype=dtype)

    return PackedBatch(
        tokens=join(lambda s: s.tokens, torch.int64),
        cu_seqlens=bounds.to(torch.int32),
        mask=join(lambda s: s.mask, torch.bool),
        turn_ids=join(lambda s: s.turn_ids, torch.int32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        engine_logprobs=join(lambda s: s.logprobs, torch.float32),
        weights=join(lambda s: [s.weight] * s.num_tokens, torch.float32),
        sequence_ids=tuple(s.sequence_id for s in sequences),
    )


def pack(sequences: Sequence[Sample], max_tokens: int) -> list[PackedBatch]:
    """Batches of at most ``max_tokens`` tokens, first-fit decreasing, deterministic. ValueError for a longer sequence."""
    for s in sequences:
        if s.num_tokens > max_tokens:
            raise ValueError(
                f"{s.sequence_id} has {s.num_tokens} tokens, more than the limit of {max_tokens}: "
                "raise the token budget, or leave long sequences out"
            )
    bins = first_fit_decreasing([s.num_tokens for s in sequences], max_tokens)
    return [make_batch([sequences[i] for i in b]) for b in bins]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``sizes`` in groups of a sum of at most ``capacity``: longest first, into the first that fits."""
    bins: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for place, (used, members) in enumerate(bins):
            if used + sizes[index] <= capacity:
                members.append(index)
                bins[place] = (used + sizes[index], members)
                break
        else:
            bins.append((sizes[index], [index]))
    return [sorted(members) for _, members in bins]


def split_dp(items: Sequence[Item], dp: int, size: Callable[[Item], int] | None = None) -> list[list[Item]]:
    """Share items over ``dp`` ranks: token totals even, largest first to the emptiest rank, order kept within a rank.

    ``size`` defaults to the item's ``num_tokens``. With fewer items than ranks some ranks get none; micro-batch counts
    are evened out by the policy, with empty batches.
    """
    measure = size or (lambda item: item.num_tokens)  # type: ignore[attr-defined]
    sizes = [measure(item) for item in items]
    totals, shares = [0] * dp, [[] for _ in range(dp)]  # type: ignore[var-annotated]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(dp), key=lambda r: (totals[r], len(shares[r]), r))
        shares[rank].append(index)
        totals[rank] += sizes[index]
    return [[items[i] for i in sorted(share)] for share in shares]


def whiten(
    advantages: Sequence[Tensor], masks: Sequence[Tensor], world: World | None = None, eps: float = 1e-8
) -> list[Tensor]:
    """Mean 0 and variance 1 over masked tokens of *all* data-parallel ranks; 0 elsewhere.

    ``advantages`` float[T] and ``masks`` bool[T] are this rank's batches, possibly none. Two passes in float64, so the
    result does not depend on how tokens are shared. Entries outside the mask are never read, even NaN.
    """
    chosen = [a[m].double() for a, m in zip(advantages, masks, strict=True)]

    def total(values: dict[str, float]) -> dict[str, float]:
        return world.all_reduce(values, group="dp") if world is not None else values

    first = total({"count": sum(len(c) for c in chosen), "sum": sum(float(c.sum()) for c in chosen)})
    count = max(first["count"], 1.0)
    mean = first["sum"] / count
    variance = total({"sq": sum(float(((c - mean) ** 2).sum()) for c in chosen)})["sq"] / count
    scale = (variance + eps) ** -0.5
    return [
        torch.zeros_like(a).masked_scatter(m, ((c - mean) * scale).to(a.dtype))
        for a, m, c in zip(advantages, masks, chosen, strict=True)
    ]
