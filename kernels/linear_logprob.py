"""Token log-probability and entropy straight from hidden states and the output head: no [T, V] tensor.

    z       = hidden @ weight^T / temperature        [R, V] for R rows at a time
    logprob = z_target - logsumexp(z),   entropy = logsumexp(z) - sum_v softmax(z)_v z_v      (see logprob.py)

    dz      = g_logprob (onehot - p) - g_entropy p (log p + entropy)
    dhidden = dz @ weight / temperature      dweight = dz^T @ hidden / temperature

Rows whose token is masked (or whose target is -100) leave before the product: half of the tokens of a terminal
trajectory are observations. Scores are float32 also for bfloat16 inputs: scores rounded to bfloat16 are off by up to
0.06 nat at |z| ~ 20. At most ``max_workspace_bytes`` hold scores: when those of all rows fit, the torch version keeps
them from forward to backward, else backward computes them again, chunk by chunk; the Triton version keeps none.

Tensor parallel: each rank holds the rows [vocab_start, vocab_start + V) of the head. Forward all-reduces five floats
a token (one MAX, one SUM). In backward dweight is local, and dhidden is the SUM over the group when
``reduce_hidden_grad`` (the default: what a caller with replicated hidden states needs); with False each rank gets its
partial sum and the caller reduces (for example by a reduce-scatter over the sequence dimension).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._common import INPUT_DTYPES, check_number, check_tensor, choose_impl, interpreting, jit, on_device, tl, triton
from .logprob import (
    IGNORE_INDEX,
    accumulate_dtype,
    check_found,
    check_range,
    check_targets,
    combine_stats,
    local_targets,
    row_coefficients,
    row_stats,
    rows_gradient,
    score_gradient,
    update_stats,
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
    fused = choose_impl(impl, hidden) == "triton" and _fits_descriptors(hidden, impl)
    rows = _live_rows(hidden, targets, mask)
    live_targets = targets if rows is None else targets[rows]
    if group is None:
        check_range(live_targets, vocab_start, weight.shape[0])
    result, rows_entropy = _LinearLogprob.apply(
        hidden, weight, live_targets, rows, temperature, entropy, vocab_start, group, reduce_hidden_grad,
        max_workspace_bytes, torch.is_grad_enabled(), fused)
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


_CACHE_BYTES = 1 << 20  # scores of a chunk on the CPU: still in the cache when their product is done


def _plan(live: Tensor, weight: Tensor, max_workspace_bytes: int) -> tuple[int, bool]:
    """(rows of a chunk, whether the scores of all rows fit)."""
    num_rows, row_bytes = live.shape[0], max(1, weight.shape[0] * torch.finfo(accumulate_dtype(live.dtype)).bits // 8)
    chunk = min(num_rows, max(1, max_workspace_bytes // row_bytes))
    fits = chunk == num_rows
    if live.device.type == "cpu" and live.dtype == accumulate_dtype(live.dtype):  # else each chunk upcasts the weight
        chunk = min(chunk, max(256, _CACHE_BYTES // row_bytes))  # a product of fewer rows is slow
    return chunk, fits


def _chunked_stats(live: Tensor, weight: Tensor, column: Tensor, here: Tensor, entropy: bool, scale: float,
                   max_workspace_bytes: int, keep: bool) -> tuple[Tensor, Tensor | None]:
    """(row_stats of all rows; with ``keep`` and where they fit, all scores)."""
    dtype, num_rows = accumulate_dtype(live.dtype), live.shape[0]
    chunk, fits = _plan(live, weight, max_workspace_bytes)
    keep = keep and fits
    scores = torch.empty(num_rows if keep else chunk, weight.shape[0], dtype=dtype, device=live.device)
    stats = torch.empty(5, num_rows, dtype=dtype, device=live.device)
    for start in range(0, num_rows, max(1, chunk)):
        part = slice(start, min(start + chunk, num_rows))
        block = _scores(live[part], weight, scale, scores[part] if keep else scores[: part.stop - start])
        stats[:, part] = row_stats(block, column[part], here[part], entropy)
    return stats, scores if keep else None


def _chunked_backward(
    live: Tensor, weight: Tensor, statistics: tuple[Tensor, ...], grads: tuple[Tensor, Tensor | None], scale: float,
    max_workspace_bytes: int, needs: tuple[bool, bool], kept: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """(d live rows, d weight) in the accumulation dtype; ``kept`` scores are overwritten."""
    dtype, num_rows = accumulate_dtype(live.dtype), live.shape[0]
    chunk, _ = _plan(live, weight, max_workspace_bytes)
    grad_live = torch.empty(live.shape, dtype=dtype, device=live.device) if needs[0] else None
    grad_weight = torch.zeros(weight.shape, dtype=dtype, device=live.device) if needs[1] else None
    scores = kept if kept is not None else torch.empty(chunk, weight.shape[0], dtype=dtype, device=live.device)
    for start in range(0, num_rows, max(1, chunk)):
        part = slice(start, min(start + chunk, num_rows))
        block = scores[part] if kept is not None else _scores(live[part], weight, scale, scores[: part.stop - start])
        column, here, maximum, total, rows_entropy = (x[part] for x in statistics)
        rows_gradient(block, column, here, maximum, total, rows_entropy, grads[0][part],
                      None if grads[1] is None else grads[1][part], block)
        _add_gradients(block, live[part], weight, scale, None if grad_live is None else grad_live[part], grad_weight)
    return grad_live, grad_weight


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor | None, temperature: float,
                entropy: bool, vocab_start: int, group: dist.ProcessGroup | None, reduce_hidden_grad: bool,
                max_workspace_bytes: int, grad_enabled: bool, fused: bool) -> tuple[Tensor, Tensor]:
        live = hidden if rows is None else hidden[rows]
        column, here = local_targets(targets, vocab_start, weight.shape[0])
        kept = None
        if fused:
            stats = _launch_stats(live, weight, column, here, entropy, 1.0 / temperature)
        else:
            stats, kept = _chunked_stats(live, weight, column, here, entropy, 1.0 / temperature, max_workspace_bytes,
                                         keep=grad_enabled and any(ctx.needs_input_grad))
        result, rows_entropy, maximum, total = combine_stats(stats, group)
        if group is not None:
            check_found(result, stats, targets)
        ctx.temperature, ctx.entropy, ctx.fused, ctx.kept_scores = temperature, entropy, fused, kept
        ctx.group, ctx.reduce_hidden_grad, ctx.max_workspace_bytes = group, reduce_hidden_grad, max_workspace_bytes
        ctx.num_tokens = hidden.shape[0]
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
        grads = grad_logprob, grad_entropy if ctx.entropy else None
        kept, ctx.kept_scores = ctx.kept_scores, None  # used up in place; a second backward computes them again
        statistics = column, here, maximum, total, rows_entropy
        arguments = live, weight, statistics, grads, 1.0 / ctx.temperature, ctx.max_workspace_bytes
        needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        if ctx.fused:
            grad_live, grad_weight = _fused_backward(*arguments, needs)
        else:
            grad_live, grad_weight = _chunked_backward(*arguments, needs, kept)
        grad_hidden = None
        if grad_live is not None:
            if ctx.group is not None and ctx.reduce_hidden_grad:
                dist.all_reduce(grad_live, dist.ReduceOp.SUM, ctx.group)
            grad_hidden = _scatter(grad_live.to(live.dtype), rows, ctx.num_tokens)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 10


def _scatter(live: Tensor, rows: Tensor | None, num_tokens: int) -> Tensor:
    """Place the live rows among num_tokens rows of zeros."""
    if rows is None:
        return live
    return live.new_zeros(num_tokens, *live.shape[1:]).index_copy_(0, rows, live)


# ----------------------------------------------------------------------------------------------- Triton kernels


class Tile(NamedTuple):
    """Block sizes of one program and its launch options."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def tile_for(dtype: torch.dtype, shared_memory_bytes: int) -> Tile:
    """The tile of one device; a stage holds (rows + columns) * depth elements of shared memory."""
    if dtype == torch.float32:
        return Tile(64, 64, 32, 8, 3)
    if shared_memory_bytes >= 220_000:  # sm_90, sm_100
        return Tile(128, 256, 64, 8, 4)
    if shared_memory_bytes >= 150_000:  # sm_80
        return Tile(128, 128, 64, 8, 3)
    return Tile(128, 64, 32, 4, 2)  # sm_86, sm_89, sm_120, gfx9: 64-100 KB


INTERPRETER_TILE = Tile(32, 64, 32, 4, 1)
_NUM_SPLITS = 8  # programs that share the vocabulary of one row block, so that few rows fill the device


def _tile(x: Tensor) -> Tile:
    if interpreting():
        return INTERPRETER_TILE
    properties = torch.cuda.get_device_properties(x.device)
    return tile_for(x.dtype, getattr(properties, "shared_memory_per_block_optin", 0))


def _fits_descriptors(hidden: Tensor, impl: str) -> bool:
    """Tensor descriptors (TMA) need rows of a multiple of 16 bytes; "auto" goes to torch where they are not."""
    row_bytes = hidden.shape[1] * hidden.element_size()
    if row_bytes % 16 == 0 and row_bytes > 0:
        return True
    if impl == "triton":
        raise ValueError(f'hidden: rows of {row_bytes} bytes; impl="triton" needs a multiple of 16, use impl="torch"')
    return False


def _descriptor(x: Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, block)


def _launch_stats(live: Tensor, weight: Tensor, column: Tensor, here: Tensor, entropy: bool, scale: float) -> Tensor:
    """row_stats of live @ weight^T * scale, the scores never leaving the chip."""
    num_rows, num_columns = live.shape[0], weight.shape[0]
    stats = torch.zeros(5, num_rows, dtype=torch.float32, device=live.device)
    stats[0] = -torch.inf
    stats[4] = here
    if num_rows == 0 or num_columns == 0:
        return stats
    tile = _tile(live)
    tiles_per_split = triton.cdiv(triton.cdiv(num_columns, tile.columns), _NUM_SPLITS)
    splits = triton.cdiv(num_columns, tile.columns * tiles_per_split)
    parts = torch.empty(splits, 4, num_rows, dtype=torch.float32, device=live.device)
    live, weight = live.contiguous(), weight.contiguous()
    with on_device(live):
        _linear_stats_kernel[(triton.cdiv(num_rows, tile.rows), splits)](
            _descriptor(live, [tile.rows, tile.depth]), _descriptor(weight, [tile.columns, tile.depth]),
            torch.where(here, column, -1), parts, num_rows, num_columns, live.shape[1], tiles_per_split, scale,
            ENTROPY=entropy, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.num_warps,
            num_stages=tile.num_stages)
    maximum = parts[:, 0].amax(0)
    drop = (parts[:, 0] - torch.where(maximum == -torch.inf, 0.0, maximum)).clamp_(min=-1e4)
    factor = drop.exp()
    stats[0] = maximum
    stats[1] = (factor * parts[:, 1]).sum(0)
    stats[2] = (factor * (parts[:, 2] + drop * parts[:, 1])).sum(0)
    stats[3] = parts[:, 3].sum(0)
    return stats


def _fused_backward(
    live: Tensor, weight: Tensor, statistics: tuple[Tensor, ...], grads: tuple[Tensor, Tensor | None], scale: float,
    max_workspace_bytes: int, needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """One slice of the vocabulary at a time: dz of all rows into a workspace in the input dtype, then two products."""
    column, here, maximum, total, rows_entropy = statistics
    num_rows, num_columns = live.shape[0], weight.shape[0]
    grad_live = torch.zeros(live.shape, dtype=torch.float32, device=live.device) if needs[0] else None
    grad_weight = torch.zeros_like(weight) if needs[1] else None
    if num_rows == 0 or num_columns == 0:
        return grad_live, grad_weight
    tile, live, weight = _tile(live), live.contiguous(), weight.contiguous()
    width = max(1, max_workspace_bytes // (num_rows * live.element_size()))
    width = min(num_columns, max(tile.columns, width // tile.columns * tile.columns))
    workspace = torch.empty(num_rows, width, dtype=live.dtype, device=live.device)
    coefficients = row_coefficients(total, rows_entropy, *grads)
    target = torch.where(here, column, -1)
    descriptors = _descriptor(live, [tile.rows, tile.depth]), _descriptor(weight, [tile.columns, tile.depth])
    for start in range(0, num_columns, width):
        stop = min(start + width, num_columns)
        with on_device(live):
            _linear_gradient_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(stop - start, tile.columns))](
                *descriptors, target, maximum, coefficients, workspace, num_rows, start, stop, width, live.shape[1],
                scale, ENTROPY=grads[1] is not None, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
                num_warps=tile.num_warps, num_stages=tile.num_stages)
        slice_gradient = workspace[:, : stop - start]
        if grad_live is not None:
            grad_live += _product(slice_gradient, weight[start:stop])
        if grad_weight is not None:
            grad_weight[start:stop] = _product(slice_gradient.t(), live)
    return grad_live, grad_weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with float32 accumulation and result."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@jit
def _score_tile(hidden_desc, weight_desc, row, column, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                DEPTH: tl.constexpr):
    """hidden[row : row + ROWS] @ weight[column : column + COLUMNS]^T; a descriptor reads 0 beyond the edges."""
    scores = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, depth, DEPTH):
        scores = tl.dot(hidden_desc.load([row, k]), weight_desc.load([column, k]).T, scores, input_precision="ieee")
    return scores


@jit
def _halves(scores, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Left and right half of a tile: two epilogues in turn hold half the registers of one, so nothing spills."""
    return tl.split(tl.permute(tl.reshape(scores, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


@jit
def _fold_half(z, offset, num_columns, target, maximum, total, weighted, found, ENTROPY: tl.constexpr):
    found += tl.sum(tl.where(offset[None, :] == target[:, None], z, 0.0), 1)
    z = tl.where(offset[None, :] < num_columns, z, float("-inf"))
    maximum, total, weighted = update_stats(z, maximum, total, weighted, ENTROPY)
    return maximum, total, weighted, found


@jit
def _linear_stats_kernel(hidden_desc, weight_desc, target_ptr, parts_ptr, num_rows, num_columns, depth, tiles_per_split,
                         scale, ENTROPY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """(M, S, U, z_target) of one block of rows over one split of the vocabulary."""
    HALF: tl.constexpr = COLUMNS // 2
    row = tl.program_id(0) * ROWS
    split = tl.program_id(1)
    rows = row + tl.arange(0, ROWS)
    target = tl.load(target_ptr + rows, mask=rows < num_rows, other=-1)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS], tl.float32)
    first = split * tiles_per_split * COLUMNS
    last = tl.minimum(first + tiles_per_split * COLUMNS, num_columns)
    for column in range(first, last, COLUMNS):
        scores = _score_tile(hidden_desc, weight_desc, row, column, depth, ROWS, COLUMNS, DEPTH) * scale
        left, right = _halves(scores, ROWS, COLUMNS)
        offset = column + tl.arange(0, HALF)
        maximum, total, weighted, found = _fold_half(
            left, offset, num_columns, target, maximum, total, weighted, found, ENTROPY)
        maximum, total, weighted, found = _fold_half(
            right, offset + HALF, num_columns, target, maximum, total, weighted, found, ENTROPY)
    out = parts_ptr + split.to(tl.int64) * 4 * num_rows + rows
    tl.store(out, maximum, mask=rows < num_rows)
    tl.store(out + num_rows, total, mask=rows < num_rows)
    tl.store(out + 2 * num_rows, weighted, mask=rows < num_rows)
    tl.store(out + 3 * num_rows, found, mask=rows < num_rows)


@jit
def _linear_gradient_kernel(hidden_desc, weight_desc, target_ptr, maximum_ptr, coefficients_ptr, workspace_ptr,
                            num_rows, start, stop, width, depth, scale, ENTROPY: tl.constexpr, ROWS: tl.constexpr,
                            COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """workspace[:, v - start] = dz_v * scale for the columns start <= v < stop."""
    HALF: tl.constexpr = COLUMNS // 2
    row = tl.program_id(0) * ROWS
    column = start + tl.program_id(1) * COLUMNS
    rows = row + tl.arange(0, ROWS)
    scores = _score_tile(hidden_desc, weight_desc, row, column, depth, ROWS, COLUMNS, DEPTH) * scale
    left, right = _halves(scores, ROWS, COLUMNS)
    offset = column + tl.arange(0, HALF)
    out = workspace_ptr + rows.to(tl.int64)[:, None] * width - start
    _store_half(left, offset, stop, rows, num_rows, target_ptr, maximum_ptr, coefficients_ptr, out, scale, ENTROPY)
    _store_half(right, offset + HALF, stop, rows, num_rows, target_ptr, maximum_ptr, coefficients_ptr, out, scale,
                ENTROPY)


@jit
def _store_half(z, offset, stop, rows, num_rows, target_ptr, maximum_ptr, coefficients_ptr, out, scale,
                ENTROPY: tl.constexpr):
    """The row values are read anew for each half: cheaper than the registers they would hold during the other."""
    inside = rows < num_rows
    target = tl.load(target_ptr + rows, mask=inside, other=-1)
    maximum = tl.load(maximum_ptr + rows, mask=inside, other=0.0)
    at_target = tl.load(coefficients_ptr + rows, mask=inside, other=0.0)
    constant = tl.load(coefficients_ptr + num_rows + rows, mask=inside, other=0.0)
    slope = tl.load(coefficients_ptr + 2 * num_rows + rows, mask=inside, other=0.0)
    is_target = offset[None, :] == target[:, None]
    gradient = score_gradient(z, is_target, maximum, at_target, constant, slope, ENTROPY) * scale
    tl.store(out + offset[None, :], gradient.to(out.dtype.element_ty), mask=inside[:, None] & (offset[None, :] < stop))
