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

from ._common import INPUT_DTYPES, check_number, check_tensor, choose_impl, jit, on_device, tl, triton

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
    result, rows_entropy = _Logprob.apply(logits, targets, temperature, entropy, vocab_start, group, inplace_grad,
                                          choose_impl(impl, logits) == "triton")
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
    block = min(num_rows, max(1, _ROW_BLOCK_BYTES // (num_columns * stats.element_size())))
    work = torch.empty(block, num_columns, dtype=dtype, device=scores.device)
    for start in range(0, num_rows, block):
        rows = slice(start, min(start + block, num_rows))
        shifted = work[: rows.stop - start]
        z = scores[rows] if scores.dtype == dtype and scale == 1.0 else shifted.copy_(scores[rows]).mul_(scale)
        torch.amax(z, 1, out=maximum[rows])
        shift = torch.where(maximum[rows] == -torch.inf, 0.0, maximum[rows])  # a row of -inf alone: no NaN
        torch.sub(z, shift[:, None], out=shifted)
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


def rows_gradient(scores: Tensor, column: Tensor, here: Tensor, maximum: Tensor, total: Tensor, rows_entropy: Tensor,
                  grad_logprob: Tensor, grad_entropy: Tensor | None, out: Tensor, scale: float = 1.0) -> None:
    """out = d loss / d (scores * scale), [R, V], a few rows at a time; out may be scores.

    M and S stay apart: M + log S would round away log S for scores of 1e4.
    """
    dtype = accumulate_dtype(scores.dtype)
    num_rows, num_columns = scores.shape
    block = max(1, _ROW_BLOCK_BYTES // max(1, num_columns * torch.finfo(dtype).bits // 8))
    for start in range(0, num_rows if num_columns else 0, block):
        rows = slice(start, start + block)
        z = scores[rows].to(dtype) * scale if scale != 1.0 else scores[rows].to(dtype)
        work = out[rows] if out.dtype == dtype else torch.empty_like(z)
        torch.sub(z, maximum[rows, None], out=work)  # log (p S)
        if grad_entropy is None:
            work.exp_().mul_((-grad_logprob[rows] / total[rows])[:, None])
        else:
            exponential = work.exp()
            work.clamp_(min=-1e4).mul_((-grad_entropy[rows] / total[rows])[:, None])
            offset = rows_entropy[rows] - total[rows].log()
            work.sub_(((grad_logprob[rows] + grad_entropy[rows] * offset) / total[rows])[:, None]).mul_(exponential)
        work.scatter_add_(1, column[rows, None], torch.where(here[rows], grad_logprob[rows], 0.0)[:, None])
        if out.dtype != dtype:
            out[rows] = work


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy: bool, vocab_start: int,
                group: dist.ProcessGroup | None, inplace_grad: bool, fused: bool) -> tuple[Tensor, Tensor]:
        logits = logits.detach()
        column, here = local_targets(targets, vocab_start, logits.shape[1])
        stats = (_launch_stats if fused else row_stats)(logits, column, here, entropy, 1.0 / temperature)
        result, rows_entropy, maximum, total = combine_stats(stats, group)
        if group is not None:
            check_found(result, stats, targets)
        ignored = targets == IGNORE_INDEX
        result.masked_fill_(ignored, 0.0)
        rows_entropy.masked_fill_(ignored, 0.0)
        ctx.logits, ctx.inplace_grad, ctx.temperature, ctx.entropy = logits, inplace_grad, temperature, entropy
        ctx.fused = fused
        ctx.save_for_backward(targets, column, here, maximum, total, rows_entropy)
        if not entropy:
            ctx.mark_non_differentiable(rows_entropy)
        return result, rows_entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        targets, column, here, maximum, total, rows_entropy = ctx.saved_tensors
        if ctx.logits is None:
            raise RuntimeError("logprob(inplace_grad=True): the logits were overwritten by the first backward")
        logits, scale = ctx.logits, 1.0 / ctx.temperature
        if ctx.inplace_grad:
            ctx.logits = None
        live = targets != IGNORE_INDEX
        grads = grad_logprob, grad_entropy if ctx.entropy else None
        if ctx.fused:
            gradient = logits if ctx.inplace_grad and logits.is_contiguous() else torch.empty_like(
                logits, memory_format=torch.contiguous_format)
            _launch_gradient(gradient, logits, column, here, live, maximum, total, rows_entropy, *grads, scale)
        else:
            gradient = logits if ctx.inplace_grad else torch.empty_like(logits)
            by_logprob = grad_logprob * scale  # d loss / d logits instead of d loss / dz
            by_entropy = grad_entropy * scale if ctx.entropy else None
            rows_gradient(logits, column, here, maximum, total, rows_entropy, by_logprob, by_entropy, gradient, scale)
            gradient.index_fill_(0, (~live).nonzero().squeeze(1), 0.0)
        return gradient, None, None, None, None, None, None, None


def check_found(result: Tensor, stats: Tensor, targets: Tensor) -> None:
    """After the all-reduce: every rank sees the same NaN rows, so either all of them raise or none does."""
    if result.is_cuda:
        return
    lost = (targets != IGNORE_INDEX) & result.isnan() & stats[0].isfinite()
    if bool(lost.any()):
        raise ValueError(f"targets: {int(targets[lost][0])} lies outside the vocabulary of every rank of the group")


# ----------------------------------------------------------------------------------------------- Triton kernels

BLOCK_COLUMNS = 4096
NUM_WARPS = 8


def _columns(num_columns: int) -> int:
    return min(BLOCK_COLUMNS, max(128, triton.next_power_of_2(num_columns)))


def _launch_stats(logits: Tensor, column: Tensor, here: Tensor, entropy: bool, scale: float) -> Tensor:
    """row_stats in one pass over the logits, one program a row."""
    num_rows, num_columns = logits.shape
    stats = torch.zeros(5, num_rows, dtype=torch.float32, device=logits.device)
    stats[4] = here
    if num_rows:
        logits = logits.contiguous()
        with on_device(logits):
            _stats_kernel[(num_rows,)](logits, torch.where(here, column, -1), stats, num_rows, num_columns, scale,
                                       ENTROPY=entropy, BLOCK=_columns(num_columns), num_warps=NUM_WARPS)
    return stats


def _launch_gradient(gradient: Tensor, logits: Tensor, column: Tensor, here: Tensor, live: Tensor, maximum: Tensor,
                     total: Tensor, rows_entropy: Tensor, grad_logprob: Tensor, grad_entropy: Tensor | None,
                     scale: float) -> None:
    """gradient [T, V] = d loss / d logits, one read and one write; gradient may be logits."""
    num_rows, num_columns = logits.shape
    if num_rows == 0 or num_columns == 0:
        return
    block = _columns(num_columns)
    coefficients = row_coefficients(total, rows_entropy, grad_logprob, grad_entropy)
    with on_device(logits):
        _gradient_kernel[(num_rows, triton.cdiv(num_columns, block))](
            gradient, logits.contiguous(), torch.where(here, column, -1), live, maximum, coefficients, num_rows,
            num_columns, scale, ENTROPY=grad_entropy is not None, BLOCK=block, num_warps=NUM_WARPS)


def row_coefficients(total: Tensor, rows_entropy: Tensor, grad_logprob: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """[3, R] with dz = 1[target] c_0 - exp(z - M) (c_1 + c_2 (z - M)), so that kernels take no logarithm."""
    if grad_entropy is None:
        return torch.stack([grad_logprob, grad_logprob / total, torch.zeros_like(total)])
    offset = grad_logprob + grad_entropy * (rows_entropy - total.log())
    return torch.stack([grad_logprob, offset / total, grad_entropy / total])


@jit
def update_stats(z, maximum, total, weighted, ENTROPY: tl.constexpr):
    """Online softmax: fold the scores z [rows, columns] into M, S, U [rows]. -inf is the identity of M."""
    top = tl.maximum(maximum, tl.max(z, 1))
    shift = tl.where(top == float("-inf"), 0.0, top)
    factor = tl.exp(maximum - shift)
    shifted = z - shift[:, None]
    exponential = tl.exp(shifted)
    if ENTROPY:
        drop = tl.maximum(maximum - shift, -1e4)  # 0 * -inf is NaN; exp(-1e4) is 0 as well
        weighted = factor * (weighted + drop * total) + tl.sum(exponential * tl.maximum(shifted, -1e4), 1)
    total = factor * total + tl.sum(exponential, 1)
    return top, total, weighted


@jit
def score_gradient(z, is_target, maximum, at_target, constant, slope, ENTROPY: tl.constexpr):
    """dz of row_coefficients for scores z [rows, columns]."""
    shifted = z - maximum[:, None]
    inner = constant[:, None]
    if ENTROPY:
        inner = inner + slope[:, None] * tl.maximum(shifted, -1e4)
    return tl.where(is_target, at_target[:, None], 0.0) - tl.exp(shifted) * inner


@jit
def _stats_kernel(logits_ptr, column_ptr, stats_ptr, num_rows, num_columns, scale, ENTROPY: tl.constexpr,
                  BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(column_ptr + row)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1], tl.float32)
    for start in range(0, num_columns, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + row * num_columns + offset, mask=offset < num_columns, other=float("-inf"))
        maximum, total, weighted = update_stats((z.to(tl.float32) * scale)[None, :], maximum, total, weighted, ENTROPY)
    target = tl.load(logits_ptr + row * num_columns + column, mask=column >= 0, other=0.0).to(tl.float32) * scale
    one = tl.arange(0, 1)
    tl.store(stats_ptr + row + one, maximum)
    tl.store(stats_ptr + num_rows + row + one, total)
    tl.store(stats_ptr + 2 * num_rows + row + one, weighted)
    tl.store(stats_ptr + 3 * num_rows + row, target)


@jit
def _gradient_kernel(gradient_ptr, logits_ptr, column_ptr, live_ptr, maximum_ptr, coefficients_ptr, num_rows,
                     num_columns, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    one = row + tl.arange(0, 1)
    live = tl.load(live_ptr + row) != 0
    column = tl.load(column_ptr + row)
    z = tl.load(logits_ptr + row * num_columns + offset, mask=(offset < num_columns) & live, other=float("-inf"))
    gradient = score_gradient(
        (z.to(tl.float32) * scale)[None, :], (offset == column)[None, :], tl.load(maximum_ptr + one),
        tl.load(coefficients_ptr + one), tl.load(coefficients_ptr + num_rows + one),
        tl.load(coefficients_ptr + 2 * num_rows + one), ENTROPY)
    gradient = tl.where(live, gradient * scale, 0.0)
    pointers = gradient_ptr + row * num_columns + offset[None, :]
    tl.store(pointers, gradient.to(gradient_ptr.dtype.element_ty), mask=offset[None, :] < num_columns)
