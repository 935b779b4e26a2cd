"""PPO loss against the formula written with autograd, its metrics, masks and normalisation."""

import math

import pytest
import torch

from megatron_rsi.kernels import ppo_loss

DOUBLE = torch.float64


def make(num=40, seed=0, dtype=DOUBLE, live=0.6):
    g = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return (torch.randn(num, generator=g, dtype=DOUBLE) * scale).to(dtype)

    old, old_values = normal() - 2, normal()
    return dict(logprob=old + normal(0.3), old_logprob=old, advantages=normal(),
                mask=torch.rand(num, generator=g) < live, entropy=normal().abs(), values=old_values + normal(0.3),
                old_values=old_values, returns=normal(), ref_logprob=old + normal(0.5),
                engine_logprob=old + normal(0.5), weights=normal().abs())


SETTINGS = dict(num_tokens_global=17.0, clip_low=0.2, clip_high=0.28, dual_clip=1.3, truncated_is=1.5, kl_coef=0.1,
                entropy_coef=0.01, value_coef=0.7, value_clip=0.2)
TRAINED = ("logprob", "entropy", "values")


def reference(x, *, num_tokens_global, clip_low=0.2, clip_high=0.2, dual_clip=None, truncated_is=None, kl_coef=0.0,
              entropy_coef=0.0, value_coef=1.0, value_clip=0.2):
    """The docstring's formula on the live rows, differentiated by autograd."""
    x = {name: t[x["mask"]] for name, t in x.items() if name != "mask"}
    ratio = (x["logprob"] - x["old_logprob"]).exp()
    s = torch.min(ratio * x["advantages"], ratio.clamp(1 - clip_low, 1 + clip_high) * x["advantages"])
    if dual_clip is not None:
        s = torch.where(x["advantages"] < 0, torch.max(s, dual_clip * x["advantages"]), s)
    if truncated_is is not None:
        s = s * (x["old_logprob"] - x["engine_logprob"]).exp().clamp(max=truncated_is)
    behind = x["ref_logprob"] - x["logprob"]
    total = -s + kl_coef * (behind.exp() - behind - 1) - entropy_coef * x["entropy"]
    plain = (x["values"] - x["returns"]) ** 2
    if value_clip is not None:
        moved = x["old_values"] + (x["values"] - x["old_values"]).clamp(-value_clip, value_clip)
        plain = torch.maximum(plain, (moved - x["returns"]) ** 2)
    return (x["weights"] * (total + value_coef * 0.5 * plain)).sum() / num_tokens_global


def loss_and_grads(function, x, **settings):
    x = {name: t.clone().requires_grad_() if name in TRAINED else t for name, t in x.items()}
    loss = function(x, **settings)
    loss.backward()
    return loss.detach(), [x[name].grad for name in TRAINED]


def ours(x, **settings):
    return ppo_loss(**x, **settings)[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("off", [(), ("dual_clip",), ("truncated_is",), ("dual_clip", "truncated_is", "value_clip")])
def test_equals_the_formula_and_its_autograd_gradient(seed, off):
    settings = {**SETTINGS, **{name: None for name in off}}
    expected, expected_grads = loss_and_grads(reference, make(seed=seed), **settings)
    got, grads = loss_and_grads(ours, make(seed=seed), **settings)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    x = make(12)
    inputs = [x.pop(name).requires_grad_() for name in TRAINED]
    assert torch.autograd.gradcheck(
        lambda *trained: ppo_loss(**x, **dict(zip(TRAINED, trained, strict=True)), **SETTINGS)[0], inputs)


def test_float32_many_blocks():
    x64, x32 = make(70_000, dtype=DOUBLE), make(70_000, dtype=torch.float32)
    expected, expected_grads = loss_and_grads(reference, x64, **SETTINGS)
    got, grads = loss_and_grads(ours, x32, **SETTINGS)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads, expected_grads, strict=True):
        close = (a.double() - b).abs() < 1e-5
        assert close.float().mean() > 0.9999  # a ratio on the clip edge may round to the other side


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
def test_masked_entries_never_matter(garbage):
    clean = make()
    dirty = {name: t.clone() for name, t in clean.items()}
    for name, t in dirty.items():
        if name != "mask":
            t[~clean["mask"]] = garbage
    loss_a, grads_a = loss_and_grads(ours, clean, **SETTINGS)
    loss_b, grads_b = loss_and_grads(ours, dirty, **SETTINGS)
    assert torch.equal(loss_a, loss_b)
    for a, b in zip(grads_a, grads_b, strict=True):
        assert torch.equal(a, b) and (b[~clean["mask"]] == 0).all()


@pytest.mark.parametrize("num", [0, 5])
def test_no_live_token_gives_zero_loss_and_zero_gradient(num):
    x = make(num)
    x["mask"] = torch.zeros(num, dtype=torch.bool)
    x["logprob"] = x["logprob"] * torch.nan
    for num_tokens_global in (0.0, 10.0):
        loss, grads = loss_and_grads(ours, x, **{**SETTINGS, "num_tokens_global": num_tokens_global})
        assert loss == 0 and all((g == 0).all() for g in grads)
    metrics = ppo_loss(**x, **SETTINGS)[1]
    assert all(math.isfinite(v) for v in metrics.values()) and metrics["ratio_max"] == 1 and metrics["num_tokens"] == 0


def test_micro_batches_add_up_to_one_batch():
    """Sum over tokens / global count: splitting unevenly changes nothing, unlike a mean of means."""
    whole = make(40)
    loss, grads = loss_and_grads(ours, whole, **SETTINGS)
    metrics = ppo_loss(**whole, **SETTINGS)[1]
    parts = [slice(0, 3), slice(3, 29), slice(29, 40)]
    pieces = [loss_and_grads(ours, {n: t[part] for n, t in whole.items()}, **SETTINGS) for part in parts]
    torch.testing.assert_close(sum(p[0] for p in pieces), loss, rtol=1e-12, atol=1e-12)
    for k, grad in enumerate(grads):
        torch.testing.assert_close(torch.cat([p[1][k] for p in pieces]), grad, rtol=1e-12, atol=1e-12)
    split = [ppo_loss(**{n: t[part] for n, t in whole.items()}, **SETTINGS)[1] for part in parts]
    for name, value in metrics.items():
        merge = max if name.endswith("_max") else min if name.endswith("_min") else sum
        assert float(merge(float(m[name]) for m in split)) == pytest.approx(float(value), rel=1e-12)


def test_metrics_by_hand():
    old = torch.zeros(3)
    new = torch.tensor([math.log(1.5), math.log(0.5), 0.0])
    _, m = ppo_loss(new, old, torch.tensor([1.0, -1.0, 2.0]), num_tokens_global=3, values=torch.tensor([1.0, 0.0, 0.5]),
                    old_values=torch.tensor([0.0, 0.0, 0.5]), returns=torch.tensor([1.0, 1.0, 0.0]),
                    entropy=torch.tensor([1.0, 2.0, 3.0]), engine_logprob=torch.tensor([0.5, 0.0, -1.0]))
    expected = dict(num_tokens=3, policy_loss_sum=-(1.2 - 0.8 + 2.0), clip_count=2, ratio_max=1.5, ratio_min=0.5,
                    approx_kl_sum=(0.5 - math.log(1.5)) + (-0.5 - math.log(0.5)), entropy_sum=6, engine_gap_sum=1.5,
                    engine_gap_max=1.0, is_weight_sum=3, value_clip_count=1,
                    value_loss_sum=0.5 * (0.8**2 + 1.0 + 0.25), ret_sum=2, ret_sq_sum=2, err_sum=0.5, err_sq_sum=1.25)
    assert set(m) == set(expected)
    for name, value in expected.items():
        assert m[name].dtype == DOUBLE and not m[name].requires_grad
        assert float(m[name]) == pytest.approx(value, abs=1e-6), name


def test_explained_variance_from_the_sums():
    x = make(500, live=1.1)
    m = ppo_loss(None, values=x["values"], returns=x["returns"], value_clip=None, num_tokens_global=500)[1]
    n = m["num_tokens"]
    variance = {k: m[f"{k}_sq_sum"] / n - (m[f"{k}_sum"] / n) ** 2 for k in ("ret", "err")}
    expected = 1 - (x["returns"] - x["values"]).var(correction=0) / x["returns"].var(correction=0)
    torch.testing.assert_close(1 - variance["err"] / variance["ret"], expected)


def test_small_kl_keeps_its_digits_in_float32():
    """Changes of 1e-4: k3 = 5e-9 a token, far below the rounding of ratio - 1 - log ratio."""
    change = torch.full((1000,), 1e-4)
    m = ppo_loss(change, torch.zeros(1000), torch.ones(1000), num_tokens_global=1000)[1]
    assert float(m["approx_kl_sum"]) == pytest.approx(1000 * (math.expm1(1e-4) - 1e-4), rel=1e-3)


def test_kl_moves_the_policy_toward_the_reference():
    logits = torch.zeros(8, requires_grad=True)
    reference = torch.linspace(-1, 1, 8).log_softmax(0)
    ids = torch.multinomial(torch.full((8,), 1 / 8), 4000, replacement=True, generator=torch.Generator().manual_seed(0))

    def kl():
        return (logits.log_softmax(0).exp() * (logits.log_softmax(0) - reference)).sum()

    before = kl().item()
    logprob = logits.log_softmax(0)[ids]
    loss, _ = ppo_loss(logprob, logprob.detach(), torch.zeros(4000), ref_logprob=reference[ids], kl_coef=1.0,
                       num_tokens_global=4000)
    loss.backward()
    with torch.no_grad():
        logits -= 0.5 * logits.grad
    assert kl().item() < before


@pytest.mark.parametrize("advantage,log_ratio,moves", [
    (1.0, 0.5, False), (1.0, -0.5, True), (-1.0, -0.5, False), (-1.0, 0.5, True), (-1.0, 50.0, True),
    (1.0, 50.0, False),
])
def test_a_clip_stops_only_moves_away(advantage, log_ratio, moves):
    new = torch.tensor([log_ratio], requires_grad=True)
    loss, _ = ppo_loss(new, torch.zeros(1), torch.tensor([advantage]), num_tokens_global=1)
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite()
    assert (new.grad != 0) == moves and (not moves or (new.grad > 0) == (advantage < 0))


def test_trajectory_weights_scale_the_loss_not_the_health_metrics():
    x = make()
    loss, m = ppo_loss(**x, **SETTINGS)
    half, m_half = ppo_loss(**{**x, "weights": x["weights"] / 2}, **SETTINGS)
    torch.testing.assert_close(half * 2, loss)
    for name in m:
        factor = 2 if name in ("policy_loss_sum", "value_loss_sum") else 1
        torch.testing.assert_close(m_half[name] * factor, m[name])


def test_inputs_unchanged_and_upstream_gradient_scales():
    x = make()
    before = {name: t.clone() for name, t in x.items()}
    _, once = loss_and_grads(ours, x, **SETTINGS)
    _, tripled = loss_and_grads(lambda x, **s: 3 * ours(x, **s), x, **SETTINGS)
    assert all(torch.equal(x[name], before[name]) for name in x)
    for a, b in zip(once, tripled, strict=True):
        torch.testing.assert_close(3 * a, b)


@pytest.mark.parametrize("change,message", [
    (dict(logprob=None, values=None, entropy=None), "give one of them"),
    (dict(old_logprob=None), "logprob is given without old_logprob"),
    (dict(returns=None), "values is given without returns"),
    (dict(old_values=None), "values is given without old_values"),
    (dict(engine_logprob=None), "truncated_is=1.5 needs engine_logprob"),
    (dict(ref_logprob=None), "kl_coef=0.1 needs ref_logprob"),
    (dict(entropy=None), "entropy_coef=0.01 needs entropy"),
    (dict(logprob=None), "entropy is given without logprob"),
    (dict(advantages=torch.zeros(7, dtype=DOUBLE)), r"advantages: shape \(7,\), expected \(40,\)"),
    (dict(advantages=torch.zeros(40)), "advantages: dtype torch.float32"),
    (dict(logprob=torch.zeros(40, dtype=torch.bfloat16)), r"convert with .float\(\)"),
    (dict(mask=torch.ones(40)), "mask: dtype"),
    (dict(num_tokens_global=0), "num_tokens_global=0, but"),
    (dict(num_tokens_global=float("inf")), "num_tokens_global=inf"),
    (dict(clip_low=1.5), "clip_low=1.5"),
    (dict(clip_high=-0.1), "clip_high=-0.1"),
    (dict(dual_clip=1.0), "dual_clip=1.0"),
    (dict(truncated_is=0.0), "truncated_is=0.0"),
    (dict(kl_coef=float("nan")), "kl_coef=nan"),
])
def test_wrong_arguments_are_refused_with_what_to_change(change, message):
    with pytest.raises(ValueError, match=message):
        ppo_loss(**{**make(), **SETTINGS, **change})
