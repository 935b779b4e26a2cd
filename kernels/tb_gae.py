"""Turn-boundary skip-observation generalised advantage estimation (TB-GAE) over packed trajectories.

Per trajectory take only the tokens the policy sampled ("action tokens"), j = 1..M; observation tokens do not exist
for the recursion. V_j is the value at the hidden state that *predicts* token j.

    boundary(j) = turn(j+1) != turn(j)                                   j < M
    (g_j, l_j)  = (gamma_u, lambda_u) at a boundary, else (gamma_w, lambda_w)
    delta_j     = r_j + g_j V_{j+1} - V_j
    A_j         = delta_j + g_j l_j A_{j+1}
    end:        V_{M+1} = A_{M+1} = 0 when terminated;
                when truncated V_{M+1} = value after the last observation, A_{M+1} = 0, g_M = gamma_u
    return_j    = V_j + A_j computed with (critic_lambda_u, critic_lambda_w)

gamma_w = lambda_w = 1 (the default) makes A_j + V_j equal for all tokens of a turn up to its next reward, so the
recursion runs over turns instead of tokens:

    G_k = R_k + gamma_u [(1 - lambda_u) V_first(k+1) + lambda_u G_{k+1}],     A_j = G_k(j) - V_j

The idea (discount and trace decay only across turn boundaries) is that of Terminal-RSI (arXiv 2610.22192); the
recursion of single tokens is GAE (arXiv 1506.02438).

    tokens   o o a a o a a a         one trajectory, o = observation, a = action
    turn     0 0 0 0 1 1 1 1
    A        0 0 x x 0 x x x         j = 1..5; the only boundary is between the 2nd and the 3rd a
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._common import check_number, check_tensor, choose_impl, jit, on_device, tl


class _Decay(NamedTuple):
    """(gamma, lambda) across a turn boundary (u) and inside a turn (w), for advantages and for returns (critic_*)."""

    gamma_u: float
    lambda_u: float
    gamma_w: float
    lambda_w: float
    critic_lambda_u: float
    critic_lambda_w: float


def tb_gae(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma_u: float = 1.0,
    lambda_u: float = 0.95,
    gamma_w: float = 1.0,
    lambda_w: float = 1.0,
    bootstrap_values: Tensor | None = None,
    truncated: Tensor | None = None,
    critic_lambda_u: float = 1.0,
    critic_lambda_w: float = 1.0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of T packed tokens in S trajectories. Not differentiable.

    values, rewards: float32 [T] (float64 allowed with impl="torch"); values[t] is read at the hidden state that
    predicts token t. mask: bool [T], True for tokens the policy sampled. turn_ids: int32 or int64 [T], compared
    only between neighbouring action tokens of one trajectory. cu_seqlens: int32 or int64 [S+1], from 0 to T,
    non-decreasing (empty trajectories allowed; checked where it lies on the CPU). truncated: bool [S], True for a
    trajectory cut off without a verdict; its tail is bootstrapped with bootstrap_values, [S] like values, ignored
    (may be NaN) for the others. Both or neither are given. All gammas and lambdas lie in [0, 1].

    Returns (advantages [T], returns [T]) in the dtype of values, both 0 where mask is False; whatever values,
    rewards and turn_ids hold there, NaN included, has no effect. Raises ValueError on wrong shapes, dtypes, devices
    or parameters.
    """
    decay = _Decay(*(check_number(name, value, 0.0, 1.0) for name, value in (
        ("gamma_u", gamma_u), ("lambda_u", lambda_u), ("gamma_w", gamma_w), ("lambda_w", lambda_w),
        ("critic_lambda_u", critic_lambda_u), ("critic_lambda_w", critic_lambda_w))))
    _check(values, rewards, mask, turn_ids, cu_seqlens, bootstrap_values, truncated)
    values, rewards = values.detach(), rewards.detach()
    if truncated is None or bootstrap_values is None:
        tail = values.new_zeros(cu_seqlens.numel() - 1)
    else:
        tail = decay.gamma_u * torch.where(truncated, bootstrap_values.detach(), 0.0)  # g_M V_{M+1}
    if values.numel() == 0:
        return torch.zeros_like(values), torch.zeros_like(values)
    if choose_impl(impl, values) == "triton":
        return _launch(values, rewards, mask, turn_ids, cu_seqlens, tail, decay)
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    method = _per_run if decay.gamma_w == decay.lambda_w == decay.critic_lambda_w == 1.0 else _per_token
    method(values, rewards, mask, turn_ids, cu_seqlens.long(), tail, decay, advantages, returns)
    return advantages, returns


def _check(values: Tensor, rewards: Tensor, mask: Tensor, turn_ids: Tensor, cu_seqlens: Tensor,
           bootstrap_values: Tensor | None, truncated: Tensor | None) -> None:
    if values.dim() != 1:
        raise ValueError(f"values: shape {tuple(values.shape)}, expected one dimension [T] of packed tokens")
    shape, integers = tuple(values.shape), (torch.int32, torch.int64)
    check_tensor("values", values, shape, values, (torch.float32, torch.float64))
    check_tensor("rewards", rewards, shape, values, (values.dtype,))
    check_tensor("mask", mask, shape, values, (torch.bool,))
    check_tensor("turn_ids", turn_ids, shape, values, integers)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens: shape {tuple(cu_seqlens.shape)}, expected [S+1], at least [1]")
    check_tensor("cu_seqlens", cu_seqlens, tuple(cu_seqlens.shape), values, integers)
    if not cu_seqlens.is_cuda:
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != shape[0]:
            raise ValueError(f"cu_seqlens: runs from {first} to {last}, expected from 0 to T={shape[0]}")
        if bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
            raise ValueError(f"cu_seqlens: {cu_seqlens.tolist()} decreases; it must be non-decreasing offsets")
    if (bootstrap_values is None) != (truncated is None):
        raise ValueError("bootstrap_values and truncated: give both or neither")
    if bootstrap_values is not None and truncated is not None:
        num_sequences = (cu_seqlens.numel() - 1,)
        check_tensor("bootstrap_values", bootstrap_values, num_sequences, values, (values.dtype,))
        check_tensor("truncated", truncated, num_sequences, values, (torch.bool,))


# ---------------------------------------------------------------------------------------------- torch reference


_GROUP_TOKENS = 1 << 18  # tokens at a time: temporaries stay in the cache and do not grow with T


def _per_run(values: Tensor, rewards: Tensor, mask: Tensor, turn_ids: Tensor, cu_seqlens: Tensor, tail: Tensor,
             decay: _Decay, advantages: Tensor, returns: Tensor) -> None:
    """gamma_w = lambda_w = 1: recursion over runs, written into advantages and returns.

    A run is a stretch of neighbouring tokens of one trajectory, one turn and one mask value in which only the last
    token has a reward. Inside it A_j + V_j is constant; between two runs of one turn (g, l) = (1, 1), so a run may be
    cut anywhere: here at every _GROUP_TOKENS tokens.
    """
    num_tokens = values.numel()
    is_start = torch.empty(num_tokens, dtype=torch.bool, device=values.device)
    parts = [slice(start, start + _GROUP_TOKENS) for start in range(0, num_tokens, _GROUP_TOKENS)]
    for part in parts:
        changes = _differs(turn_ids[part])
        changes |= _differs(mask[part])
        torch.bitwise_or(changes, rewards[part][:-1].bool(), out=is_start[part][1:])
    is_start[::_GROUP_TOKENS] = True
    is_start[cu_seqlens[cu_seqlens < num_tokens]] = True
    starts = is_start.nonzero().squeeze(1)
    lengths = torch.diff(starts, append=starts.new_tensor([num_tokens]))
    action = mask.index_select(0, starts).nonzero().squeeze(1)
    first = starts.index_select(0, action)
    last = first + lengths.index_select(0, action) - 1
    run_returns = _run_returns(first, last, values, rewards, turn_ids, cu_seqlens, tail, decay)
    per_run = values.new_zeros(len(run_returns), starts.numel())
    per_run.index_copy_(1, action, run_returns.to(values.dtype))

    cuts = torch.searchsorted(starts, starts.new_tensor([*(part.start for part in parts), num_tokens])).tolist()
    zero = values.new_zeros(())
    for part, begin, end in zip(parts, cuts[:-1], cuts[1:], strict=True):
        value = values[part]
        run = torch.repeat_interleave(lengths[begin:end].int(), output_size=value.numel())  # of each token
        torch.index_select(per_run[-1, begin:end], 0, run, out=returns[part])
        target = returns[part] if len(per_run) == 1 else per_run[0, begin:end].index_select(0, run)
        torch.where(mask[part], target - value, zero, out=advantages[part])  # faster than masked_fill


def _differs(x: Tensor) -> Tensor:
    """x[1:] != x[:-1] for integers and booleans; on the CPU this is several times faster than the comparison."""
    return torch.bitwise_xor(x[1:], x[:-1]).bool()


def _run_returns(first: Tensor, last: Tensor, values: Tensor, rewards: Tensor, turn_ids: Tensor, cu_seqlens: Tensor,
                 tail: Tensor, decay: _Decay) -> Tensor:
    """G of each action run, float64 [1 or 2, number of runs]: with lambda_u and, where it differs, critic_lambda_u."""
    num_runs = first.numel()
    sequence = torch.searchsorted(cu_seqlens[1:], first, right=True)
    turn, value = turn_ids.index_select(0, first), values.index_select(0, first).double()
    ends = torch.ones(num_runs, dtype=torch.bool, device=first.device)
    ends[:-1] = sequence[1:] != sequence[:-1]
    crosses = torch.zeros_like(ends)
    crosses[:-1] = turn[1:] != turn[:-1]
    gamma = _where(crosses, decay.gamma_u, 1.0, torch.float64).masked_fill_(ends, 0.0)
    next_value = torch.nn.functional.pad(value[1:], (0, 1))
    reward = rewards.index_select(0, last).double() + torch.where(ends, tail.index_select(0, sequence), 0.0)
    lambdas = list(dict.fromkeys([decay.lambda_u, decay.critic_lambda_u]))
    lambda_ = torch.stack([_where(crosses, across, 1.0, torch.float64) for across in lambdas])
    return _affine_scan(gamma * lambda_, reward + gamma * (1 - lambda_) * next_value)


def _per_token(values: Tensor, rewards: Tensor, mask: Tensor, turn_ids: Tensor, cu_seqlens: Tensor, tail: Tensor,
               decay: _Decay, advantages: Tensor, returns: Tensor) -> None:
    """Any (gamma_w, lambda_w), written into advantages and returns.

    Groups of whole neighbouring trajectories in turn: memory grows with a group, or with the longest trajectory.
    """
    offsets, first = cu_seqlens.tolist(), 0
    for end in range(1, len(offsets)):
        if end < len(offsets) - 1 and offsets[end] - offsets[first] < _GROUP_TOKENS:
            continue
        part = slice(offsets[first], offsets[end])
        if part.start < part.stop:
            advantages[part], returns[part] = _scan_tokens(
                values[part], rewards[part], mask[part], turn_ids[part], cu_seqlens[first:end + 1] - part.start,
                tail[first:end], decay)
        first = end


def _scan_tokens(values: Tensor, rewards: Tensor, mask: Tensor, turn_ids: Tensor, cu_seqlens: Tensor, tail: Tensor,
                 decay: _Decay) -> tuple[Tensor, Tensor]:
    """(advantages, returns) by a blocked affine scan over the action tokens of a few trajectories."""
    index = mask.nonzero().squeeze(1)
    value = values.index_select(0, index)
    past_last = torch.searchsorted(index, cu_seqlens)  # number of action tokens before each offset
    owns = past_last[1:] > past_last[:-1]
    last = past_last[1:][owns] - 1
    crosses = _differs(turn_ids.index_select(0, index))
    delta = rewards.index_select(0, index).sub_(value)
    last_delta = delta[last] + tail[owns]
    delta[:-1].addcmul_(_where(crosses, decay.gamma_u, decay.gamma_w, value.dtype), value[1:])
    delta[last] = last_delta

    lambdas = dict.fromkeys([(decay.lambda_u, decay.lambda_w), (decay.critic_lambda_u, decay.critic_lambda_w)])
    carry = value.new_zeros(len(lambdas), index.numel())
    for row, (across, within) in zip(carry, lambdas, strict=True):
        row[:-1] = _where(crosses, decay.gamma_u * across, decay.gamma_w * within, value.dtype)
        row[last] = 0.0
    scanned = _affine_scan(carry, delta.repeat(len(lambdas), 1))
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages.index_copy_(0, index, scanned[0])
    returns.index_copy_(0, index, value.add_(scanned[-1]))
    return advantages, returns


def _where(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """torch.where on two Python floats, which by itself rounds both to float32."""
    return torch.where(condition, torch.tensor(yes, dtype=dtype, device=condition.device), no)


_SCAN_BLOCK = 16


def _affine_scan(a: Tensor, b: Tensor) -> Tensor:
    """x_j = b_j + a_j x_{j+1} along the last dimension, x beyond the end = 0. a, b: [K, N], both overwritten.

    Long inputs: blocks of 16 tokens advance together one token at a time, their first elements are scanned in turn,
    and a last pass adds what enters each block: O(N) work in O(log N) vector steps. Short inputs: doubling.
    """
    num_rows, num = b.shape
    if num <= 256 * _SCAN_BLOCK:
        step = 1
        while step < num:
            b[:, :-step] += a[:, :-step] * b[:, step:]
            a[:, :-step] *= a[:, step:].clone()
            step *= 2
        return b
    pad = -num % _SCAN_BLOCK
    a, b = (torch.nn.functional.pad(x, (0, pad)).view(-1, _SCAN_BLOCK).t().contiguous() for x in (a, b))
    for j in range(_SCAN_BLOCK - 2, -1, -1):
        b[j].addcmul_(a[j], b[j + 1])
        a[j].mul_(a[j + 1])
    starts = _affine_scan(a[0].view(num_rows, -1).clone(), b[0].view(num_rows, -1).clone())
    entering = torch.nn.functional.pad(starts[:, 1:], (0, 1)).flatten()
    return b.addcmul_(a, entering).t().reshape(num_rows, -1)[:, :num]


# ----------------------------------------------------------------------------------------------- Triton kernels

NUM_WARPS = 8
_BLOCK_TOKENS = 4096


def _launch(values: Tensor, rewards: Tensor, mask: Tensor, turn_ids: Tensor, cu_seqlens: Tensor, tail: Tensor,
            decay: _Decay) -> tuple[Tensor, Tensor]:
    """One launch, one program a trajectory; every token is read once and written once (22 bytes, int32 turn ids)."""
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    num_sequences = cu_seqlens.numel() - 1
    block = _BLOCK_TOKENS if values.is_cuda else 64
    with on_device(values):
        _tb_gae_kernel[(num_sequences,)](
            values.contiguous(), rewards.contiguous(), mask.contiguous(), turn_ids.contiguous(),
            cu_seqlens.contiguous(), tail, advantages, returns, *decay, BLOCK=block, num_warps=NUM_WARPS)
    return advantages, returns


@jit
def _earliest(a, b):
    return tl.minimum(a, b)


@jit
def _compose(a_later, b_later, a_earlier, b_earlier):
    """x -> a_earlier (a_later x + b_later) + b_earlier; a reverse scan hands over the later element first."""
    return a_earlier * a_later, a_earlier * b_later + b_earlier


@jit
def _tb_gae_kernel(values_ptr, rewards_ptr, mask_ptr, turns_ptr, offsets_ptr, tail_ptr, advantages_ptr, returns_ptr,
                   gamma_u, lambda_u, gamma_w, lambda_w, critic_lambda_u, critic_lambda_w, BLOCK: tl.constexpr):
    """Walks one trajectory from its end, a block of tokens at a time.

    Carried to the earlier block: the next action token's position, its advantage, and its advantage with the critic's
    lambda. An observation token is the identity map of the scan.
    """
    NONE: tl.constexpr = 2147483647  # no action token follows
    sequence = tl.program_id(0)
    start = tl.load(offsets_ptr + sequence).to(tl.int64)
    length = (tl.load(offsets_ptr + sequence + 1) - start).to(tl.int32)
    tail = tl.load(tail_ptr + sequence)
    lane = tl.arange(0, BLOCK)
    next_position = tl.full([], NONE, tl.int32)
    advantage = tl.full([], 0.0, tl.float32)
    critic = tl.full([], 0.0, tl.float32)
    num_blocks = tl.cdiv(length, BLOCK)
    for step in range(0, num_blocks):
        offset = (num_blocks - 1 - step) * BLOCK + lane
        token = start + offset
        live = tl.load(mask_ptr + token, mask=offset < length, other=0) != 0
        live_after = tl.load(mask_ptr + token + 1, mask=offset + 1 < length, other=0) != 0
        after = tl.where(live_after, offset + 1, NONE)
        after = tl.associative_scan(tl.where(lane == BLOCK - 1, next_position, after), 0, _earliest, reverse=True)
        goes_on = live & (after != NONE)
        value = tl.load(values_ptr + token, mask=live, other=0.0)
        reward = tl.load(rewards_ptr + token, mask=live, other=0.0)
        turn = tl.load(turns_ptr + token, mask=live, other=0)
        next_value = tl.load(values_ptr + start + after, mask=goes_on, other=0.0)
        next_turn = tl.load(turns_ptr + start + after, mask=goes_on, other=0)
        crosses = turn != next_turn
        gamma = tl.where(crosses, gamma_u, gamma_w)
        delta = tl.where(live, reward - value + tl.where(goes_on, gamma * next_value, tail), 0.0)

        decay = tl.where(goes_on, gamma * tl.where(crosses, lambda_u, lambda_w), tl.where(live, 0.0, 1.0))
        factor, scanned = tl.associative_scan((decay, delta), 0, _compose, reverse=True)
        scanned += factor * advantage
        tl.store(advantages_ptr + token, tl.where(live, scanned, 0.0), mask=offset < length)
        advantage = tl.sum(tl.where(lane == 0, scanned, 0.0))

        decay = tl.where(goes_on, gamma * tl.where(crosses, critic_lambda_u, critic_lambda_w), tl.where(live, 0.0, 1.0))
        factor, scanned = tl.associative_scan((decay, delta), 0, _compose, reverse=True)
        scanned += factor * critic
        tl.store(returns_ptr + token, tl.where(live, scanned + value, 0.0), mask=offset < length)
        critic = tl.sum(tl.where(lane == 0, scanned, 0.0))
        next_position = tl.minimum(next_position, tl.min(tl.where(live, offset, NONE)))
