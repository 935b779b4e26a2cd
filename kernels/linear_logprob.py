"""Token log-probability and entropy straight from hidden states and the output head: no [T, V] tensor.

    z       = hidden @ weight^T / temperature        [R, V] for R rows at a time
    logprob = z_target - logsumexp(z),   entropy = logsumexp(z) - sum_v softmax(z)_v z_v      (see logprob.py)

    dz      = g_logprob (onehot - p) - g_entropy p (log p + entropy)
    dhidden = dz @ weight / temperature      dweight = dz^T @ hidden / temperature

Rows whose token is masked (or whose target is -100) leave before the product: half of the tokens of a terminal
trajectory are observations. Scores are float32 also for bfloat16 inputs: scores rounded to bfloat16 are off by up to
0.06 nat at |z| ~ 20. At most ``max_workspace_bytes`` hold scores: when those of all rows fit, they are kept from
forward to backward, else backward computes them again, chunk by chunk.

Tensor parallel: each rank holds the rows [vocab_start, vocab_start + V) of the head. Forward all-reduces five floats
a token (one MAX, one SUM). In backward dweight is local, and dhidden is the SUM over the group when
``reduce_hidden_grad`` (the default: what a caller with replicated hidden states needs); with False each rank gets its
partial sum and the caller reduces (for example by a reduce-scatter over the sequence dimension).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._common import INPUT_DTYPES, check_number, check_tensor, choose_impl
from .logprob import (
    IGNORE_INDEX,
    accumulate_dtype,
    check_found,
    check_range,
    check_targets,
    combine_stats,
    local_targets,
    row_stats,
    rows_gradient_,
)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    reduce_hidden_grad: bool = True,
    max_workspace_bytes: int = 256 << 20,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log-probability [T] of each target and, with ``entropy``, the entropy [T] of each row, in nats.

    hidden: float32, bfloat16, float16 or float64 [T, H], the state that predicts the target. weight: [V, H] of the
    same dtype, this rank's rows of the output head, which start at global id vocab_start. targets: int64 [T] global
    ids, -100 to ignore a row. mask: bool [T]; False rows are skipped before the product (log-prob, entropy and
    gradient 0; their target and hidden state may be anything, NaN included). temperature > 0 divides the scores.
    group: the ranks the vocabulary is split over; all call with equal hidden, targets and mask, and must get the same
    incoming gradient. max_workspace_bytes: bound of the buffers that hold scores, at least one row of V floats.

    Outputs are float32 (float64 for float64 inputs), differentiable in hidden and weight through both results.
    Raises ValueError on wrong shapes, dtypes, devices or parameters, and for a target on no rank (checked on the
    CPU; on CUDA such a row's log-prob is NaN).
    """
    if hidden.dim() != 2 or hidden.dtype not in INPUT_DTYPES:
        raise ValueError(f"hidden: {hidden.dtype} {tuple(hidden.shape)}, expected floating point [T, H]")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected [V, H] with H={hidden.shape[1]} of hidden")
    check_tensor("weight", weight, tuple(weight.shape), hidden, (hidden.dtype,))
    check_targets(targets, hidden, hidden.shape[0])
    temperature = check_number("temperature", temperature, 0.0, low_open=True)
    row_bytes = weight.shape[0] * torch.finfo(accumulate_dtype(hidden.dtype)).bits // 8
    if max_workspace_bytes < max(row_bytes, 1):
        raise ValueError(f"max_workspace_bytes={max_workspace_bytes}: one row of V={weight.shape[0]} scores takes "
                         f"{row_bytes}")
    choose_impl(impl, hidden)
    rows = _live_rows(hidden, targets, mask)
    live_targets = targets if rows is None else targets[rows]
    if group is None:
        check_range(live_targets, vocab_start, weight.shape[0])
    result, rows_entropy = _LinearLogprob.apply(
        hidden, weight, live_targets, rows, temperature, entropy, vocab_start, group, reduce_hidden_grad,
        max_workspace_bytes, torch.is_grad_enabled())
    return result, rows_entropy if entropy else None


def _live_rows(hidden: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor | None:
    """Indices of the rows to compute, None for all of them."""
    live = targets != IGNORE_INDEX
    if mask is not None:
        check_tensor("mask", mask, (hidden.shape[0],), hidden, (torch.bool,))
        live &= mask
    rows = live.nonzero().squeeze(1)
    return None if rows.numel() == hidden.shape[0] else rows


# ---------------------------------------------------------------------------------------------- torch reference


def _scores(hidden: Tensor, weight: Tensor, scale: float, out: Tensor) -> Tensor:
    """out = hidden @ weight^T * scale with float32 accumulation and result."""
    if hidden.dtype == out.dtype:
        return torch.addmm(out, hidden, weight.t(), beta=0, alpha=scale, out=out)
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out).mul_(scale)
    upcast = hidden.to(out.dtype)
    for columns, part in _upcast_slices(weight, out.dtype):
        torch.addmm(out[:, columns], upcast, part.t(), beta=0, alpha=scale, out=out[:, columns])
    return out


def _upcast_slices(weight: Tensor, dtype: torch.dtype) -> Any:
    """(slice of rows, those rows of weight in dtype): the CPU has no float32-accumulating half-precision product."""
    step = max(1, (8 << 20) // max(1, weight.shape[1] * 4))
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        yield rows, weight[rows].to(dtype)


def _add_gradients(grad_scores: Tensor, hidden: Tensor, weight: Tensor, scale: float, grad_hidden: Tensor | None,
                   grad_weight: Tensor | None) -> None:
    """grad_hidden = grad_scores @ weight * scale (overwritten); grad_weight += grad_scores^T @ hidden * scale."""
    same = hidden.dtype == grad_scores.dtype
    if hidden.is_cuda and not same:  # tensor cores: low-precision operands, float32 result
        operand = grad_scores.to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden.copy_(torch.mm(operand, weight, out_dtype=torch.float32).mul_(scale))
        if grad_weight is not None:
            grad_weight.add_(torch.mm(operand.t(), hidden, out_dtype=torch.float32), alpha=scale)
        return
    if grad_hidden is not None:
        parts = [(slice(None), weight)] if same else _upcast_slices(weight, grad_scores.dtype)
        grad_hidden.zero_()
        for columns, part in parts:
            grad_hidden.addmm_(grad_scores[:, columns], part, alpha=scale)
    if grad_weight is not None:
        grad_weight.addmm_(grad_scores.t(), hidden.to(grad_scores.dtype), alpha=scale)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor | None, temperature: float,
                entropy: bool, vocab_start: int, group: dist.ProcessGroup | None, reduce_hidden_grad: bool,
                max_workspace_bytes: int, grad_enabled: bool) -> tuple[Tensor, Tensor]:
        live = hidden if rows is None else hidden[rows]
        dtype = accumulate_dtype(hidden.dtype)
        num_rows, num_columns = live.shape[0], weight.shape[0]
        column, here = local_targets(targets, vocab_start, num_columns)
        chunk = _rows_per_chunk(num_rows, num_columns, dtype, max_workspace_bytes)
        scores = torch.empty(chunk, num_columns, dtype=dtype, device=hidden.device)
        stats = torch.empty(5, num_rows, dtype=dtype, device=hidden.device)
        for start in range(0, num_rows, max(1, chunk)):
            part = slice(start, min(start + chunk, num_rows))
            block = _scores(live[part], weight, 1.0 / temperature, scores[: part.stop - start])
            stats[:, part] = row_stats(block, column[part], here[part], entropy)
        result, rows_entropy, maximum, total = combine_stats(stats, group)
        if group is not None:
            check_found(result, stats, targets)
        ctx.temperature, ctx.entropy, ctx.group, ctx.chunk = temperature, entropy, group, chunk
        ctx.reduce_hidden_grad, ctx.num_tokens = reduce_hidden_grad, hidden.shape[0]
        ctx.kept_scores = scores if grad_enabled and chunk == num_rows and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(live, weight, column, here, rows, maximum, total, rows_entropy)
        outputs = _scatter(result, rows, hidden.shape[0]), _scatter(rows_entropy, rows, hidden.shape[0])
        if not entropy:
            ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        live, weight, column, here, rows, maximum, total, rows_entropy = ctx.saved_tensors
        if rows is not None:
            grad_logprob = grad_logprob[rows]
            grad_entropy = grad_entropy[rows] if ctx.entropy else grad_entropy
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dtype, scale, num_rows = total.dtype, 1.0 / ctx.temperature, live.shape[0]
        grad_live = torch.empty(live.shape, dtype=dtype, device=live.device) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=live.device) if needs_weight else None
        kept, ctx.kept_scores = ctx.kept_scores, None  # used up in place; a second backward computes them again
        scores = kept if kept is not None else total.new_empty(ctx.chunk, weight.shape[0])
        for start in range(0, num_rows, max(1, ctx.chunk)):
            part = slice(start, min(start + ctx.chunk, num_rows))
            block = scores[: part.stop - start]
            if kept is None:
                _scores(live[part], weight, scale, block)
            rows_gradient_(block, column[part], here[part], maximum[part], total[part], rows_entropy[part],
                           grad_logprob[part], grad_entropy[part] if ctx.entropy else None)
            _add_gradients(block, live[part], weight, scale, None if grad_live is None else grad_live[part],
                           grad_weight)
        grad_hidden = None
        if grad_live is not None:
            if ctx.group is not None and ctx.reduce_hidden_grad:
                dist.all_reduce(grad_live, dist.ReduceOp.SUM, ctx.group)
            grad_hidden = _scatter(grad_live.to(live.dtype), rows, ctx.num_tokens)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 9


def _rows_per_chunk(num_rows: int, num_columns: int, dtype: torch.dtype, max_workspace_bytes: int) -> int:
    row_bytes = max(1, num_columns * torch.finfo(dtype).bits // 8)
    return min(num_rows, max(1, max_workspace_bytes // row_bytes))


def _scatter(live: Tensor, rows: Tensor | None, num_tokens: int) -> Tensor:
    """Place the live rows among num_tokens rows of zeros."""
    if rows is None:
        return live
    return live.new_zeros(num_tokens, *live.shape[1:]).index_copy_(0, rows, live)
