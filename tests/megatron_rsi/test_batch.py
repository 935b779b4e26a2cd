"""Packing, splitting and whitening."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_helpers import samples

from megatron_rsi.batch import (
    Sample,
    first_fit_decreasing,
    make_batch,
    pack,
    split_dp,
    whiten,
)
from megatron_rsi.rollout.records import Completion, Trajectory, Turn, Verdict


def trajectory(name: str = "a/1", last_context: int = 0) -> Trajectory:
    turns = [
        Turn(context_ids=[1, 2, 3], completion=_said([10, 11])),
        Turn(context_ids=[4] * 200, completion=_said([12, 13, 14], "length")),
    ]
    return Trajectory(attempt_id=name, task_id="t", harness="terminus", turns=turns, verdict=Verdict())


def _said(ids: list[int], finish: str = "stop") -> Completion:
    return Completion(ids=ids, logprobs=[-0.5 * (i + 1) for i in range(len(ids))], finish=finish, weight_version=0)


def test_a_trajectory_becomes_a_stream() -> None:
    batch = make_batch([Sample.of(trajectory(), reward=1.0, weight=0.5), Sample.of(trajectory("b/2"), reward=-2.0)])
    assert batch.cu_seqlens.tolist() == [0, 208, 416] and batch.num_action_tokens == 10
    assert batch.tokens[[0, 3, 4, 205, 207]].tolist() == [1, 10, 11, 12, 14]
    assert batch.action_index.tolist() == [3, 4, 205, 206, 207, 211, 212, 413, 414, 415]
    assert batch.positions[[0, 207, 208, 415]].tolist() == [0, 207, 0, 207]
    assert batch.turn_ids[[4, 5, 207]].tolist() == [0, 1, 1] and batch.sequence_index[[207, 208]].tolist() == [0, 1]
    assert batch.engine_logprobs[[3, 4, 5, 207]].tolist() == [-0.5, -1.0, 0.0, -1.5]
    # the reward lies on the last action token, never on an observation
    assert batch.rewards.nonzero().squeeze(1).tolist() == [207, 415]
    assert batch.rewards[[207, 415]].tolist() == [1.0, -2.0] and bool(batch.mask[[207, 415]].all())
    assert batch.weights[[0, 207, 208]].tolist() == [0.5, 0.5, 1.0] and batch.sequence_ids == ("a/1", "b/2")


def test_reward_is_not_put_on_a_trailing_observation() -> None:
    s = Sample("x", [1, 2, 3, 4, 5], [False, True, True, False, False], [0, 0, 0, 1, 1], [0.0] * 5, reward=1.0)
    assert make_batch([s]).rewards.tolist() == [0, 0, 1, 0, 0]


def test_lengths_are_checked_where_data_comes_in() -> None:
    with pytest.raises(ValueError, match="x: 3 tokens but 2 entries in mask"):
        Sample("x", [1, 2, 3], [False, True], [0, 0, 0], [0.0] * 3)
    with pytest.raises(ValueError, match="no sampled token"):
        make_batch([Sample("x", [1, 2], [False, False], [0, 0], [0.0] * 2)])
    batch = make_batch(samples())
    with pytest.raises(ValueError, match=r"batch.values has shape \(3,\)"):
        batch.with_(values=torch.zeros(3))
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        batch.with_(cu_seqlens=torch.tensor([0, 5, 5, batch.num_tokens], dtype=torch.int32))
    with pytest.raises(ValueError, match="sequence 1 begins with a sampled token"):
        batch.with_(mask=batch.mask.index_fill(0, batch.cu_seqlens[1:2].long(), True))


def test_a_sequence_beyond_the_budget_is_refused_by_name() -> None:
    items = [Sample.of(trajectory()), samples()[0]]
    with pytest.raises(ValueError, match="a/1 has 208 tokens, more than the limit of 100"):
        pack(items, 100)
    assert [b.sequence_ids for b in pack(items, 208)] == [("a/1",), ("0",)]
    assert [b.sequence_ids for b in pack(items, 217)] == [("a/1", "0")]
    assert pack([], 10) == []


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_first_fit_decreasing_keeps_the_budget(sizes: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(sizes, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert all(0 < sum(sizes[i] for i in b) <= capacity for b in bins)
    assert bins == first_fit_decreasing(list(sizes), capacity)
    half_full = [b for b in bins if sum(sizes[i] for i in b) <= capacity / 2]
    assert len(half_full) <= 1  # two of them would have been one


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 5))
def test_split_dp_shares_everything_evenly(sizes: list[int], dp: int) -> None:
    shares = split_dp(list(enumerate(sizes)), dp, size=lambda item: item[1])
    assert sorted(x for s in shares for x in s) == list(enumerate(sizes)) and len(shares) == dp
    totals = [sum(size for _, size in s) for s in shares]
    assert max(totals) - min(totals) <= max(sizes, default=0)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 5))
def test_whitening_over_the_mask_only(seed: int, size: int, num_batches: int) -> None:
    g = torch.Generator().manual_seed(seed)
    values = [5 + 3 * torch.randn(size, generator=g) for _ in range(num_batches)]
    masks = [torch.rand(size, generator=g) < 0.6 for _ in range(num_batches)]
    spoiled = [v.masked_fill(~m, math.nan) for v, m in zip(values, masks, strict=True)]
    white = whiten(spoiled, masks)
    chosen = torch.cat([w[m] for w, m in zip(white, masks, strict=True)])
    assert all(torch.count_nonzero(w[~m]) == 0 for w, m in zip(white, masks, strict=True))
    if len(chosen) > 1:
        assert abs(float(chosen.mean())) < 1e-4 and float(chosen.var(unbiased=False)) == pytest.approx(1, abs=1e-3)
    joined = whiten([torch.cat(spoiled)], [torch.cat(masks)])[0]
    assert torch.allclose(torch.cat(white), joined, atol=1e-6)


def test_whitening_nothing() -> None:
    assert whiten([], []) == []
    assert whiten([torch.ones(3)], [torch.zeros(3, dtype=torch.bool)])[0].tolist() == [0, 0, 0]
    assert whiten([torch.ones(3)], [torch.ones(3, dtype=torch.bool)])[0].abs().max() < 1e-3
