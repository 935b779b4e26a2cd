"""PPO policy and value loss over packed tokens: one pass gives the loss, its gradients and the health metrics.

Over live tokens (mask True) with weight w, N = num_tokens_global:

    ratio  = exp(clamp(logprob - old_logprob, -20, 20))
    s      = min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A);   dual clip: s = max(s, dual_clip A) if A < 0
    c      = min(exp(old_logprob - engine_logprob), truncated_is)        1 without truncated_is
    kl     = exp(ref_logprob - logprob) - (ref_logprob - logprob) - 1    k3, >= 0, 0 where they agree
    v_clip = old_values + clamp(values - old_values, -value_clip, value_clip)
    value  = 0.5 max((values - returns)^2, (v_clip - returns)^2)

    loss   = sum w (-c s + kl_coef kl - entropy_coef entropy + value_coef value) / N

A token *sum* over a *global* count: gradients of micro-batches and data-parallel ranks add up to those of one batch.
Differentiable in logprob, entropy and values only. Beyond the clamp at 20 nats the gradient is that of the clamped
ratio, so that a token far off is still pushed back. PPO: arXiv 1707.06347; dual clip: 1912.09729; clip-higher:
2503.14476; k3: J. Schulman, "Approximating KL divergence".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._common import check_number, check_tensor, choose_impl, jit, on_device, tl, triton

_MAX_LOG_RATIO = 20.0
_BLOCK = 1 << 17  # tokens a pass: all temporaries of a block stay in the cache


class _Settings(NamedTuple):
    num_tokens_global: float
    clip_low: float
    clip_high: float
    dual_clip: float | None
    truncated_is: float | None
    kl_coef: float
    entropy_coef: float
    value_coef: float
    value_clip: float | None


POLICY_METRICS = ("policy_loss_sum", "approx_kl_sum", "clip_count", "ratio_max", "ratio_min")
ENGINE_METRICS = ("engine_gap_sum", "engine_gap_max", "is_weight_sum")
VALUE_METRICS = ("value_loss_sum", "value_clip_count", "ret_sum", "ret_sq_sum", "err_sum", "err_sq_sum")


def ppo_loss(
    logprob: Tensor | None,
    old_logprob: Tensor | None = None,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    num_tokens_global: float,
    entropy: Tensor | None = None,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    returns: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    engine_logprob: Tensor | None = None,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    truncated_is: float | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    value_coef: float = 1.0,
    value_clip: float | None = 0.2,
    impl: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Scalar loss and detached metrics of T packed tokens.

    All tensors are float32 [T] (float64 allowed with impl="torch") except mask, bool [T]; None means all tokens are
    live. The policy part is present when logprob is given (then old_logprob and advantages are needed), the value part
    when values is given (then returns, and old_values unless value_clip is None, are needed). weights: the weight of
    each token's trajectory. num_tokens_global: live tokens over all micro-batches and data-parallel ranks.
    Nothing at a masked position matters, NaN included; no live token gives loss 0 and gradient 0.

    Metrics, float64 scalars: sums to be added over micro-batches and ranks, and extremes (names ending in _max and
    _min; 1 for ratios and 0 for gaps when there is no live token). Always num_tokens. Policy: policy_loss_sum (with w
    and c), approx_kl_sum (k3 of old against new: ratio - 1 - log ratio), clip_count (ratio outside the clip range),
    ratio_max, ratio_min; entropy_sum; ref_kl_sum; engine_gap_sum and engine_gap_max of |old_logprob - engine_logprob|
    and is_weight_sum (c). Value: value_loss_sum (with w and the 0.5), value_clip_count, and for the explained
    variance ret_sum, ret_sq_sum, err_sum, err_sq_sum with err = returns - values. Only the two loss sums hold w.

    Raises ValueError on wrong shapes, dtypes, devices, parameters, and on missing companions.
    """
    settings = _settings(num_tokens_global, clip_low, clip_high, dual_clip, truncated_is, kl_coef, entropy_coef,
                         value_coef, value_clip)
    tensors = {"logprob": logprob, "old_logprob": old_logprob, "advantages": advantages, "entropy": entropy,
               "values": values, "old_values": old_values, "returns": returns, "ref_logprob": ref_logprob,
               "engine_logprob": engine_logprob, "weights": weights}
    _check(tensors, mask, settings)
    first = logprob if logprob is not None else values
    assert first is not None
    chosen = choose_impl(impl, first)
    rows = None if mask is None or chosen == "triton" else mask.nonzero().squeeze(1)
    if not settings.num_tokens_global and (first.numel() if mask is None else bool(mask.any())):
        raise ValueError("num_tokens_global=0, but some tokens are live")
    constants = {name: tensor.detach() for name, tensor in tensors.items()
                 if tensor is not None and name not in ("logprob", "entropy", "values")}
    names = metric_names(logprob is not None, entropy is not None, ref_logprob is not None,
                         engine_logprob is not None, values is not None)
    if chosen == "triton":
        loss, metrics = _FusedPpoLoss.apply(logprob, entropy, values, mask, constants, settings, names)
    else:
        loss, metrics = _PpoLoss.apply(logprob, entropy, values, rows, constants, settings)
    return loss, dict(zip(names, metrics.unbind(), strict=True))


def metric_names(policy: bool, entropy: bool, reference: bool, engine: bool, value: bool) -> list[str]:
    """Names of the metrics of one call, in order."""
    names = ["num_tokens"]
    if policy:
        names += POLICY_METRICS
        names += ["entropy_sum"] * entropy + ["ref_kl_sum"] * reference + list(ENGINE_METRICS) * engine
    return names + list(VALUE_METRICS) * value


def _settings(num_tokens_global: float, clip_low: float, clip_high: float, dual_clip: float | None,
              truncated_is: float | None, kl_coef: float, entropy_coef: float, value_coef: float,
              value_clip: float | None) -> _Settings:
    return _Settings(
        check_number("num_tokens_global", num_tokens_global, 0.0),
        check_number("clip_low", clip_low, 0.0, 1.0),
        check_number("clip_high", clip_high, 0.0),
        None if dual_clip is None else check_number("dual_clip", dual_clip, 1.0, low_open=True),
        None if truncated_is is None else check_number("truncated_is", truncated_is, 0.0, low_open=True),
        check_number("kl_coef", kl_coef, 0.0),
        check_number("entropy_coef", entropy_coef, 0.0),
        check_number("value_coef", value_coef, 0.0),
        None if value_clip is None else check_number("value_clip", value_clip, 0.0))


def _check(tensors: dict[str, Tensor | None], mask: Tensor | None, settings: _Settings) -> None:
    first = tensors["logprob"] if tensors["logprob"] is not None else tensors["values"]
    if first is None:
        raise ValueError("logprob and values are both None: give one of them")
    if first.dim() != 1:
        raise ValueError(f"shape {tuple(first.shape)}: expected one dimension [T] of packed tokens")
    needs = {"logprob": ["old_logprob", "advantages"],
             "values": ["returns"] + ["old_values"] * (settings.value_clip is not None)}
    for name, companions in needs.items():
        missing = [other for other in companions if tensors[name] is not None and tensors[other] is None]
        if missing:
            raise ValueError(f"{name} is given without {' and '.join(missing)}")
    for name in ("entropy", "ref_logprob", "engine_logprob"):
        if tensors[name] is not None and tensors["logprob"] is None:
            raise ValueError(f"{name} is given without logprob")
    for coefficient, name in (("truncated_is", "engine_logprob"), ("kl_coef", "ref_logprob"),
                              ("entropy_coef", "entropy")):
        if getattr(settings, coefficient) and tensors[name] is None and tensors["logprob"] is not None:
            raise ValueError(f"{coefficient}={getattr(settings, coefficient)} needs {name}")
    if first.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype {first.dtype}: expected torch.float32 (or float64); convert with .float()")
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(name, tensor, tuple(first.shape), first, (first.dtype,))
    if mask is not None:
        check_tensor("mask", mask, tuple(first.shape), first, (torch.bool,))


# ---------------------------------------------------------------------------------------------- torch reference


def _policy_block(block: dict[str, Tensor], settings: _Settings) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(loss sum, its gradient by logprob without w, metrics of metric_names) of the policy part of one block."""
    advantages, logprob, old_logprob = block["advantages"], block["logprob"], block["old_logprob"]
    log_ratio = (logprob - old_logprob).clamp_(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    change = log_ratio.expm1()  # ratio - 1 without the cancellation that would eat a small KL
    ratio = change + 1.0
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    clip_count = (clipped != ratio).count_nonzero()
    surrogate = ratio * advantages
    objective = torch.minimum(surrogate, clipped.mul_(advantages))
    if settings.dual_clip is not None:
        floor = torch.where(advantages < 0, settings.dual_clip * advantages, -torch.inf)
        objective = torch.maximum(objective, floor)
    gradient = (surrogate == objective).to(ratio.dtype).mul_(surrogate).neg_()  # 0 where a clip binds
    engine: list[Tensor] = []
    if "engine_logprob" in block:
        importance, engine = _engine_gap(old_logprob - block["engine_logprob"], settings.truncated_is)
        gradient.mul_(importance)
        objective = objective * importance
    policy_sum = -_weighted_sum(objective, block)
    low, high = torch.aminmax(ratio)
    metrics = [policy_sum, change.sub_(log_ratio).sum(), clip_count, high, low]
    loss = policy_sum
    if "entropy" in block:
        metrics.append(block["entropy"].sum())
        loss = loss - settings.entropy_coef * _weighted_sum(block["entropy"], block)
    if "ref_logprob" in block:
        behind = (block["ref_logprob"] - logprob).clamp_(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        change = behind.expm1()
        gradient.add_(change, alpha=-settings.kl_coef)
        kl = change.sub_(behind)
        metrics.append(kl.sum())
        loss = loss + settings.kl_coef * _weighted_sum(kl, block)
    return loss, gradient, metrics + engine


def _engine_gap(gap: Tensor, truncated_is: float | None) -> tuple[Tensor, list[Tensor]]:
    """(c, ENGINE_METRICS) from old_logprob - engine_logprob; c = 1 without truncated_is."""
    if truncated_is is None:
        importance = torch.ones_like(gap)
    else:
        importance = gap.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp_().clamp_(max=truncated_is)
    gap = gap.abs_()
    return importance, [gap.sum(), gap.amax(), importance.sum()]


def _value_block(block: dict[str, Tensor], settings: _Settings) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(loss sum without value_coef, its gradient by values without w, VALUE_METRICS) of one block."""
    returns = block["returns"]
    error = block["values"] - returns
    gradient, squared = error, error.square()
    worst, clip_count = squared, torch.zeros((), device=error.device)
    if settings.value_clip is not None:
        move = block["values"] - block["old_values"]
        clipped_move = move.clamp(-settings.value_clip, settings.value_clip)
        bound = clipped_move != move
        clip_count = bound.count_nonzero()
        clipped = clipped_move.add_(block["old_values"]).sub_(returns).square_()
        worst = torch.maximum(squared, clipped)
        # where the clip does not bind both are one error, up to rounding; where it binds the clipped one is constant
        gradient = torch.where(bound.logical_and_(squared < clipped), 0.0, error)
    loss = _weighted_sum(worst, block) * 0.5
    return loss, gradient, [loss, clip_count, returns.sum(), returns @ returns, -error.sum(), squared.sum()]


def _weighted_sum(x: Tensor, block: dict[str, Tensor]) -> Tensor:
    return x @ block["weights"] if "weights" in block else x.sum()


def _combine(names: list[str], blocks: list[list[Tensor]]) -> Tensor:
    """Metrics of all blocks, float64 [number of names]."""
    return _merge(names, torch.stack([torch.stack([entry.double() for entry in block]) for block in blocks]))


def _merge(names: list[str], table: Tensor) -> Tensor:
    """Add up the rows of table, float64 [blocks, number of names]; take extremes where the name says so."""
    merged = table.sum(0)
    for column, name in enumerate(names):
        if name.endswith("_max"):
            merged[column] = table[:, column].amax()
        elif name.endswith("_min"):
            merged[column] = table[:, column].amin()
    return merged


def _no_metrics(names: list[str]) -> list[float]:
    return [1.0 if name.startswith("ratio_") else 0.0 for name in names]


class _PpoLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprob: Tensor | None, entropy: Tensor | None, values: Tensor | None, rows: Tensor | None,
                constants: dict[str, Tensor], settings: _Settings) -> tuple[Tensor, Tensor]:
        tensors = {"logprob": logprob, "entropy": entropy, "values": values, **constants}
        live = {name: x.detach() if rows is None else x.detach().index_select(0, rows)
                for name, x in tensors.items() if x is not None}
        first = logprob if logprob is not None else values
        assert first is not None
        num_live = first.numel() if rows is None else rows.numel()
        names = metric_names(logprob is not None, entropy is not None, "ref_logprob" in live,
                             "engine_logprob" in live, values is not None)
        scale = 1.0 / settings.num_tokens_global if num_live else 0.0
        gradients = {name: torch.empty_like(live[name]) for name, x in (("logprob", logprob), ("values", values))
                     if x is not None}
        losses, table = [], []
        for start in range(0, num_live, _BLOCK):
            part = slice(start, start + _BLOCK)
            block = {name: x[part] for name, x in live.items()}
            weight = block["weights"] * scale if "weights" in block else scale
            metrics: list[Tensor] = []
            if logprob is not None:
                loss, gradient, metrics = _policy_block(block, settings)
                torch.mul(gradient, weight, out=gradients["logprob"][part])
                losses.append(loss)
            if values is not None:
                loss, gradient, value_metrics = _value_block(block, settings)
                torch.mul(gradient, weight, out=gradients["values"][part]).mul_(settings.value_coef)
                losses.append(loss * settings.value_coef)
                metrics = metrics + value_metrics
            table.append(metrics)
        merged = _combine(names[1:], table) if table else first.new_tensor(_no_metrics(names[1:]), dtype=torch.float64)
        total = torch.stack(losses).sum(dtype=torch.float64) * scale if losses else merged.new_zeros(())
        if entropy is not None:
            weight = live["weights"] if "weights" in live else torch.ones_like(live["entropy"])
            gradients["entropy"] = weight * (-settings.entropy_coef * scale)
        ctx.rows, ctx.num_tokens = rows, first.numel()
        ctx.save_for_backward(*(gradients.get(name) for name in ("logprob", "entropy", "values")))
        metrics_vector = torch.cat([merged.new_tensor([num_live]), merged])
        ctx.mark_non_differentiable(metrics_vector)
        return total.to(first.dtype), metrics_vector

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for needed, gradient in zip(ctx.needs_input_grad, ctx.saved_tensors, strict=False):
            if not needed or gradient is None:
                gradients.append(None)
            elif ctx.rows is None:
                gradients.append(gradient * grad_loss)
            else:
                full = gradient.new_zeros(ctx.num_tokens)
                gradients.append(full.index_copy_(0, ctx.rows, gradient * grad_loss))
        return *gradients, None, None, None


# ----------------------------------------------------------------------------------------------- Triton kernels

BLOCK_TOKENS = 1024
NUM_WARPS = 4


class _FusedPpoLoss(torch.autograd.Function):
    """One launch writes the gradients (already divided by N) and one row of partial metrics a block."""

    @staticmethod
    def forward(ctx: Any, logprob: Tensor | None, entropy: Tensor | None, values: Tensor | None, mask: Tensor | None,
                constants: dict[str, Tensor], settings: _Settings, names: list[str]) -> tuple[Tensor, Tensor]:
        tensors = {"logprob": logprob, "entropy": entropy, "values": values, "mask": mask, **constants}
        tensors = {name: None if x is None else x.detach().contiguous() for name, x in tensors.items()}
        first = logprob if logprob is not None else values
        assert first is not None
        gradients = {name: torch.empty_like(x, memory_format=torch.contiguous_format)
                     for name in ("logprob", "entropy", "values") if (x := tensors[name]) is not None}
        num_tokens = first.numel()
        num_blocks = triton.cdiv(num_tokens, BLOCK_TOKENS)
        table = first.new_zeros(num_blocks, len(names) + 1)  # the first column is the loss
        scale = 1.0 / settings.num_tokens_global if settings.num_tokens_global else 0.0
        arguments = [tensors.get(name) for name in (
            "logprob", "old_logprob", "advantages", "entropy", "ref_logprob", "engine_logprob", "values", "old_values",
            "returns", "weights", "mask")]
        if num_blocks:
            with on_device(first):
                _ppo_kernel[(num_blocks,)](
                    *arguments, gradients.get("logprob"), gradients.get("entropy"), gradients.get("values"), table,
                    num_tokens, len(names) + 1, scale, settings.clip_low, settings.clip_high, settings.dual_clip,
                    settings.truncated_is, settings.kl_coef, settings.entropy_coef, settings.value_coef,
                    settings.value_clip, BLOCK=BLOCK_TOKENS, num_warps=NUM_WARPS)
        ctx.save_for_backward(*(gradients.get(name) for name in ("logprob", "entropy", "values")))
        if num_blocks:
            merged = _merge(["loss", *names], table.double())
        else:
            merged = table.new_tensor([0.0, 0.0, *_no_metrics(names[1:])], dtype=torch.float64)
        metrics = merged[1:]
        nothing = metrics[0] == 0
        empty = torch.tensor(_no_metrics(names), dtype=torch.float64, device=first.device)
        metrics = torch.where(nothing, empty, metrics)
        ctx.mark_non_differentiable(metrics)
        return (merged[0] * scale).to(first.dtype), metrics

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [gradient * grad_loss if needed and gradient is not None else None
                     for needed, gradient in zip(ctx.needs_input_grad, ctx.saved_tensors, strict=False)]
        return *gradients, None, None, None, None


@jit
def _k3(x):
    """exp(x) - 1 - x; a series near 0, where the plain form has no digits left."""
    series = x * x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040))))))
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1.0 - x)


@jit
def _ppo_kernel(logprob_ptr, old_logprob_ptr, advantages_ptr, entropy_ptr, ref_logprob_ptr, engine_logprob_ptr,
                values_ptr, old_values_ptr, returns_ptr, weights_ptr, mask_ptr, grad_logprob_ptr, grad_entropy_ptr,
                grad_values_ptr, table_ptr, num_tokens, row_length, scale, clip_low, clip_high, dual_clip, truncated_is,
                kl_coef, entropy_coef, value_coef, value_clip, BLOCK: tl.constexpr):
    """Absent tensors and options are None, so their code is not compiled. Metrics follow the order of metric_names."""
    block = tl.program_id(0).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    live = inside
    if mask_ptr is not None:
        live = tl.load(mask_ptr + token, mask=inside, other=0) != 0
    out = table_ptr + block * row_length
    weight = tl.where(live, 1.0, 0.0)
    tl.store(out + 1, tl.sum(weight))
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + token, mask=live, other=0.0)
    loss = tl.zeros([BLOCK], tl.float32)
    column = 2
    if logprob_ptr is not None:
        logprob = tl.load(logprob_ptr + token, mask=live, other=0.0)
        old_logprob = tl.load(old_logprob_ptr + token, mask=live, other=0.0)
        advantage = tl.load(advantages_ptr + token, mask=live, other=0.0)
        log_ratio = tl.minimum(tl.maximum(logprob - old_logprob, -20.0), 20.0)
        ratio = tl.exp(log_ratio)
        clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip_low), 1.0 + clip_high)
        surrogate = ratio * advantage
        objective = tl.minimum(surrogate, clipped * advantage)
        if dual_clip is not None:
            objective = tl.where(advantage < 0, tl.maximum(objective, dual_clip * advantage), objective)
        gradient = tl.where(surrogate == objective, -surrogate, 0.0)
        gap = tl.zeros([BLOCK], tl.float32)
        importance = tl.full([BLOCK], 1.0, tl.float32)
        if engine_logprob_ptr is not None:
            gap = old_logprob - tl.load(engine_logprob_ptr + token, mask=live, other=0.0)
            if truncated_is is not None:
                importance = tl.minimum(tl.exp(tl.minimum(tl.maximum(gap, -20.0), 20.0)), truncated_is)
                gradient *= importance
                objective *= importance
            gap = tl.abs(gap)
        policy = -objective * weight
        loss += policy
        tl.store(out + 2, tl.sum(policy))
        tl.store(out + 3, tl.sum(_k3(log_ratio)))
        tl.store(out + 4, tl.sum(tl.where(live & (clipped != ratio), 1.0, 0.0)))
        tl.store(out + 5, tl.max(tl.where(live, ratio, float("-inf"))))
        tl.store(out + 6, tl.min(tl.where(live, ratio, float("inf"))))
        column = 7
        if entropy_ptr is not None:
            entropy = tl.load(entropy_ptr + token, mask=live, other=0.0)
            loss -= entropy_coef * weight * entropy
            tl.store(out + column, tl.sum(entropy))
            tl.store(grad_entropy_ptr + token, tl.where(live, -entropy_coef * scale * weight, 0.0), mask=inside)
            column += 1
        if ref_logprob_ptr is not None:
            behind = tl.load(ref_logprob_ptr + token, mask=live, other=0.0) - logprob
            behind = tl.where(live, tl.minimum(tl.maximum(behind, -20.0), 20.0), 0.0)
            kl = _k3(behind)
            gradient -= kl_coef * (kl + behind)  # exp(behind) - 1
            loss += kl_coef * weight * kl
            tl.store(out + column, tl.sum(kl))
            column += 1
        if engine_logprob_ptr is not None:
            tl.store(out + column, tl.sum(gap))
            tl.store(out + column + 1, tl.max(gap))
            tl.store(out + column + 2, tl.sum(tl.where(live, importance, 0.0)))
            column += 3
        tl.store(grad_logprob_ptr + token, tl.where(live, gradient * weight * scale, 0.0), mask=inside)
    if values_ptr is not None:
        value = tl.load(values_ptr + token, mask=live, other=0.0)
        target = tl.load(returns_ptr + token, mask=live, other=0.0)
        error = value - target
        squared = error * error
        worst = squared
        gradient = error
        bound = tl.zeros([BLOCK], tl.float32)
        if value_clip is not None:
            old_value = tl.load(old_values_ptr + token, mask=live, other=0.0)
            move = value - old_value
            clipped_move = tl.minimum(tl.maximum(move, -value_clip), value_clip)
            clipped_error = old_value + clipped_move - target
            worst = tl.maximum(squared, clipped_error * clipped_error)
            free = clipped_move == move
            gradient = tl.where(free | (squared >= clipped_error * clipped_error), error, 0.0)
            bound = tl.where(free, 0.0, 1.0)
        value_loss = 0.5 * worst * weight
        loss += value_coef * value_loss
        tl.store(out + column, tl.sum(value_loss))
        tl.store(out + column + 1, tl.sum(bound))
        tl.store(out + column + 2, tl.sum(target))
        tl.store(out + column + 3, tl.sum(target * target))
        tl.store(out + column + 4, tl.sum(-error))
        tl.store(out + column + 5, tl.sum(squared))
        tl.store(grad_values_ptr + token, tl.where(live, gradient * (value_coef * scale) * weight, 0.0), mask=inside)
    tl.store(out, tl.sum(loss))
