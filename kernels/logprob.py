"""Token log-probability and entropy from logits that exist, vocabulary-parallel, without a float32 copy of them.

    z_v     = logits_v / temperature
    logZ    = M + log sum_v exp(z_v - M),   M = max_v z_v
    logprob = z_target - logZ
    entropy = logZ - sum_v p_v z_v = log S - U / S,   S = sum_v exp(z_v - M),   U = sum_v (z_v - M) exp(z_v - M)

    d/dz_v  = g_logprob (1[v = target] - p_v) - g_entropy p_v (log p_v + entropy),    then / temperature

The vocabulary may be split over a process group: rank r holds the columns [vocab_start, vocab_start + V). Then M is
one MAX all-reduce and (S, U, z_target, target found) one SUM all-reduce of four floats a token; the gradient of the
local columns needs no communication. p_v (log p_v + entropy) is taken as 0 where p_v = 0, so -inf logits are fine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._common import INPUT_DTYPES, check_number, check_tensor, choose_impl

IGNORE_INDEX = -100
_ROW_BLOCK_BYTES = 1 << 20  # working copy of a few rows at a time: stays in the cache


def logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    inplace_grad: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log-probability [T] of each target and, with ``entropy``, the entropy [T] of each row, in nats.

    logits: float32, bfloat16, float16 or float64 [T, V], this rank's columns of the vocabulary, which start at
    global id vocab_start. targets: int64 [T] global ids; -100 marks a row to ignore (log-prob, entropy and gradient
    0, whatever its logits hold). temperature > 0 divides the logits. group: the ranks the vocabulary is split over,
    all of which call with the same targets and, in backward, the same incoming gradient.

    inplace_grad: write the gradient into the storage of logits during backward. This saves T * V elements, destroys
    the logits and allows one backward; logits must not be a leaf whose values are still needed.

    Outputs are float32 (float64 for float64 logits). Raises ValueError on wrong shapes, dtypes, devices or
    parameters, and for a target on no rank (checked on the CPU; on CUDA such a row's log-prob is NaN).
    """
    if logits.dim() != 2 or logits.dtype not in INPUT_DTYPES:
        raise ValueError(f"logits: {logits.dtype} {tuple(logits.shape)}, expected floating point [T, V]")
    check_targets(targets, logits, logits.shape[0])
    temperature = check_number("temperature", temperature, 0.0, low_open=True)
    if group is None:
        check_range(targets, vocab_start, logits.shape[1])
    choose_impl(impl, logits)
    result, rows_entropy = _Logprob.apply(logits, targets, temperature, entropy, vocab_start, group, inplace_grad)
    return result, rows_entropy if entropy else None


def check_targets(targets: Tensor, like: Tensor, num_tokens: int) -> None:
    check_tensor("targets", targets, (num_tokens,), like, (torch.int64,))


def check_range(targets: Tensor, vocab_start: int, num_columns: int) -> None:
    """ValueError for a target outside [vocab_start, vocab_start + num_columns); free of a device synchronisation."""
    if targets.is_cuda or targets.numel() == 0:
        return
    outside = (targets != IGNORE_INDEX) & ((targets < vocab_start) | (targets >= vocab_start + num_columns))
    if bool(outside.any()):
        raise ValueError(f"targets: {int(targets[outside][0])} lies outside the vocabulary [{vocab_start}, "
                         f"{vocab_start + num_columns}); pass {IGNORE_INDEX} to ignore a row, group= to split it")


# ------------------------------------------------------------------------- torch reference (row helpers, shared)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def local_targets(targets: Tensor, vocab_start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """(column of each target on this rank, 0 where it is elsewhere; whether it is here)."""
    column = targets - vocab_start
    here = (column >= 0) & (column < num_columns) & (targets != IGNORE_INDEX)
    return torch.where(here, column, 0), here


def row_stats(scores: Tensor, column: Tensor, here: Tensor, entropy: bool, scale: float = 1.0) -> Tensor:
    """Local (M, S, U, z_target, found), [5, R], of the rows z = scores * scale, a few rows at a time.

    scores: [R, V], unchanged. U is 0 unless ``entropy``.
    """
    dtype = accumulate_dtype(scores.dtype)
    num_rows, num_columns = scores.shape
    stats = torch.zeros(5, num_rows, dtype=dtype, device=scores.device)
    if num_columns == 0 or num_rows == 0:
        stats[0] = -torch.inf
        return stats
    maximum, total, weighted, target, found = stats
    target.copy_(torch.where(here, scores.gather(1, column[:, None]).squeeze(1).to(dtype) * scale, 0.0))
    found.copy_(here)
    maximum.copy_(scores.amax(1)).mul_(scale)
    shift = torch.where(maximum == -torch.inf, 0.0, maximum)  # a row of -inf alone: exp(-inf - 0) = 0, no NaN
    block = max(1, _ROW_BLOCK_BYTES // (num_columns * stats.element_size()))
    for start in range(0, num_rows, block):
        rows = slice(start, start + block)
        shifted = scores[rows].to(dtype) * scale if scale != 1.0 else scores[rows].to(dtype)
        shifted = shifted - shift[rows, None]
        if entropy:
            exponential = shifted.exp()
            torch.sum(exponential, 1, out=total[rows])
            exponential.mul_(shifted.clamp_(min=-1e4))  # 0 * -inf is NaN; exp(-1e4) is 0 as well
            torch.sum(exponential, 1, out=weighted[rows])
        else:
            torch.sum(shifted.exp_(), 1, out=total[rows])
    return stats


def combine_stats(stats: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-prob, entropy, M, S) of each row from the statistics of all ranks: one MAX and one SUM all-reduce."""
    if group is not None:
        maximum = stats[0].clone()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        local = torch.where(stats[0] == -torch.inf, 0.0, stats[0])
        drop = torch.where(stats[0] == -torch.inf, -torch.inf, local - maximum)
        factor = drop.exp()
        summed = stats[1:].clone()
        summed[1] = factor * (stats[2] + torch.where(factor == 0, 0.0, drop) * stats[1])
        summed[0] *= factor
        dist.all_reduce(summed, dist.ReduceOp.SUM, group)
        stats = torch.cat([maximum[None], summed])
    maximum, total, weighted, target, found = stats
    log_total = total.log()
    result = target - maximum - log_total
    return result.masked_fill_(found == 0, torch.nan), log_total - weighted / total, maximum, total


def rows_gradient_(scores: Tensor, column: Tensor, here: Tensor, maximum: Tensor, total: Tensor, rows_entropy: Tensor,
                   grad_logprob: Tensor, grad_entropy: Tensor | None, scale: float = 1.0) -> Tensor:
    """Overwrite scores [R, V] by d loss / d (scores * scale), a few rows at a time; returns scores.

    M and S stay apart: M + log S would round away log S for scores of 1e4.
    """
    dtype = accumulate_dtype(scores.dtype)
    num_rows, num_columns = scores.shape
    if num_columns == 0 or num_rows == 0:
        return scores
    block = max(1, _ROW_BLOCK_BYTES // (num_columns * torch.finfo(dtype).bits // 8))
    for start in range(0, num_rows, block):
        rows = slice(start, start + block)
        work = scores[rows].to(dtype)
        work = torch.mul(work, scale, out=work) if scale != 1.0 else work
        work.sub_(maximum[rows, None])  # log (p S); in place where scores already has this dtype
        if grad_entropy is None:
            work.exp_().mul_((-grad_logprob[rows] / total[rows])[:, None])
        else:
            exponential = work.exp()
            work.clamp_(min=-1e4).mul_((-grad_entropy[rows] / total[rows])[:, None])
            offset = rows_entropy[rows] - total[rows].log()
            work.sub_(((grad_logprob[rows] + grad_entropy[rows] * offset) / total[rows])[:, None]).mul_(exponential)
        work.scatter_add_(1, column[rows, None], torch.where(here[rows], grad_logprob[rows], 0.0)[:, None])
        if work.dtype != scores.dtype:
            scores[rows] = work
    return scores


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy: bool, vocab_start: int,
                group: dist.ProcessGroup | None, inplace_grad: bool) -> tuple[Tensor, Tensor]:
        logits = logits.detach()
        column, here = local_targets(targets, vocab_start, logits.shape[1])
        stats = row_stats(logits, column, here, entropy, 1.0 / temperature)
        result, rows_entropy, maximum, total = combine_stats(stats, group)
        if group is not None:
            check_found(result, stats, targets)
        ignored = targets == IGNORE_INDEX
        result.masked_fill_(ignored, 0.0)
        rows_entropy.masked_fill_(ignored, 0.0)
        ctx.logits, ctx.inplace_grad, ctx.temperature, ctx.entropy = logits, inplace_grad, temperature, entropy
        ctx.save_for_backward(targets, column, here, maximum, total, rows_entropy)
        if not entropy:
            ctx.mark_non_differentiable(rows_entropy)
        return result, rows_entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        targets, column, here, maximum, total, rows_entropy = ctx.saved_tensors
        if ctx.logits is None:
            raise RuntimeError("logprob(inplace_grad=True): the logits were overwritten by the first backward")
        gradient = ctx.logits if ctx.inplace_grad else ctx.logits.clone()
        if ctx.inplace_grad:
            ctx.logits = None
        rows_gradient_(gradient, column, here, maximum, total, rows_entropy, grad_logprob,
                       grad_entropy if ctx.entropy else None, 1.0 / ctx.temperature)
        if ctx.temperature != 1.0:
            gradient.div_(ctx.temperature)
        gradient.masked_fill_((targets == IGNORE_INDEX)[:, None], 0.0)
        return gradient, None, None, None, None, None, None


def check_found(result: Tensor, stats: Tensor, targets: Tensor) -> None:
    """After the all-reduce: every rank sees the same NaN rows, so either all of them raise or none does."""
    if result.is_cuda:
        return
    lost = (targets != IGNORE_INDEX) & result.isnan() & stats[0].isfinite()
    if bool(lost.any()):
        raise ValueError(f"targets: {int(targets[lost][0])} lies outside the vocabulary of every rank of the group")
