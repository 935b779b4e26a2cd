"""Triton logprob and linear_logprob in the interpreter against float64 log-softmax."""

import math

import pytest
import torch

from megatron_rsi.kernels import linear_logprob, logprob

FORWARD = dict(atol=3e-5, rtol=3e-5)  # all inputs: sums are float32
BACKWARD = {torch.float32: dict(atol=3e-5, rtol=3e-5), torch.float16: dict(atol=4e-3, rtol=4e-3),
            torch.bfloat16: dict(atol=3e-2, rtol=3e-2)}  # the gradient is rounded to the input dtype, twice


def reference(scores, targets, live):
    log_p = scores.log_softmax(1)
    picked = log_p.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    entropy = -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(1)
    return torch.where(live, picked, 0.0), torch.where(live, entropy, 0.0)


def grads_of(outputs, inputs, seed=1):
    g = torch.Generator().manual_seed(seed)
    loss = 0.0
    for out in outputs:
        if out is not None:
            loss = loss + out.double() @ torch.randn(out.shape, generator=g, dtype=torch.float64)
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("dtype", list(BACKWARD))
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000, 4097])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature,inplace", [(1.0, False), (0.6, False), (0.6, True)])
def test_logprob(dtype, vocab, entropy, temperature, inplace):
    g = torch.Generator().manual_seed(vocab)
    scores = (3 * torch.randn(5, vocab, generator=g)).to(dtype)
    targets = torch.randint(0, vocab, (5,), generator=g)
    targets[2] = -100
    scores[2] = torch.nan
    exact = torch.where(targets[:, None] < 0, 0.0, scores.double()).requires_grad_()
    expected = reference(exact / temperature, targets, targets >= 0)[: 1 + entropy]
    leaf = scores.clone().requires_grad_()
    logits = leaf * 1
    got = logprob(logits, targets, temperature=temperature, entropy=entropy, inplace_grad=inplace, impl="triton")
    for a, b in zip(got, expected, strict=False):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, **FORWARD)
    assert torch.equal(logits.nan_to_num(), scores.nan_to_num())
    (grad,), (expected_grad,) = grads_of(got, leaf), grads_of(expected, exact)
    torch.testing.assert_close(grad.double(), expected_grad, **BACKWARD[dtype])
    if vocab > 1:
        assert torch.equal(logits.nan_to_num(), scores.nan_to_num()) != inplace


def odd_rows(vocab):
    rows = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[0] -= 1e4
    rows[1] += 1e4
    rows[2, ::2] = -torch.inf
    rows[3] = -torch.inf
    rows[3, 5] = -3.0
    rows[4] = -50.0
    rows[5, 5] = 800.0
    rows[6, 7] = 800.0
    rows[7] *= 1e3
    return rows.float(), torch.full((8,), 5)


@pytest.mark.parametrize("vocab", [19, 129, 4099])
def test_logprob_of_odd_rows(vocab):
    """All negative, huge, -inf, a single finite entry, equal entries, a dominant target, a dominant other."""
    rows, targets = odd_rows(vocab)
    exact, logits = rows.double().requires_grad_(), rows.clone().requires_grad_()
    expected = reference(exact, targets, torch.ones(8, dtype=torch.bool))
    got = logprob(logits, targets, entropy=True, impl="triton")
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(got[0][4].item(), -math.log(vocab))
    (grad,) = torch.autograd.grad(got[0].sum(), logits, retain_graph=True)
    one_hot = torch.nn.functional.one_hot(targets, vocab)
    torch.testing.assert_close(grad.double(), (one_hot - exact.softmax(1)).detach(), rtol=1e-5, atol=2e-6)
    (grad,) = torch.autograd.grad(got[1].sum(), logits)
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", list(BACKWARD))
@pytest.mark.parametrize("num_tokens", [1, 31, 33, 70])
@pytest.mark.parametrize("hidden_size,vocab", [(8, 1), (16, 63), (40, 65), (72, 300)])
@pytest.mark.parametrize("entropy", [False, True])
def test_linear_logprob(dtype, num_tokens, hidden_size, vocab, entropy):
    g = torch.Generator().manual_seed(num_tokens * vocab)
    hidden = torch.randn(num_tokens, hidden_size, generator=g).to(dtype)
    weight = torch.randn(vocab, hidden_size, generator=g).to(dtype)
    targets = torch.randint(0, vocab, (num_tokens,), generator=g)
    mask = torch.rand(num_tokens, generator=g) < 0.7
    hidden[~mask] = torch.nan
    targets[~mask] = 10**12
    exact = [torch.where(mask[:, None], hidden, 0.0).double().requires_grad_(), weight.double().requires_grad_()]
    expected = reference(exact[0] @ exact[1].t() / 0.8, torch.where(mask, targets, 0), mask)[: 1 + entropy]
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    before = [x.detach().clone() for x in inputs]
    got = linear_logprob(*inputs, targets, mask=mask, temperature=0.8, entropy=entropy, impl="triton",
                         max_workspace_bytes=max(100 * num_tokens * hidden.element_size(), vocab * 4))
    for a, b in zip(got, expected, strict=False):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, **FORWARD)
    for a, b in zip(grads_of(got, inputs), grads_of(expected, exact), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, **BACKWARD[dtype])
    for a, b in zip(inputs, before, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_linear_logprob_of_far_off_scores(offset):
    """Padding columns score 0 in the product; with every real score negative they must not win."""
    hidden, weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(67, 16)
    hidden[:, 0], weight[:, 0] = 1.0, offset
    weight[:, 1] = torch.linspace(-1, 1, 67)
    targets = torch.tensor([0, 66, 33, 64, 63])
    expected = reference((hidden.double() @ weight.double().t()), targets, torch.ones(5, dtype=torch.bool))
    for a, b in zip(linear_logprob(hidden, weight, targets, entropy=True, impl="triton"), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_nothing_live(num_tokens):
    hidden, weight = torch.randn(num_tokens, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    targets = torch.full((num_tokens,), -100)
    for out in (linear_logprob(hidden, weight, targets, entropy=True, impl="triton"),
                logprob(hidden @ weight.t(), targets, entropy=True, impl="triton")):
        for grad in torch.autograd.grad(out[0].sum() + out[1].sum(), (hidden, weight)):
            assert (grad == 0).all()
        assert (out[0] == 0).all() and (out[1] == 0).all()


def test_frozen_head_or_frozen_hidden():
    hidden, weight, targets = torch.randn(40, 16), torch.randn(70, 16), torch.arange(40)
    both = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = torch.autograd.grad(linear_logprob(*both, targets, impl="torch")[0].sum(), both)
    for trained in range(2):
        inputs = [hidden.clone(), weight.clone()]
        inputs[trained].requires_grad_()
        (grad,) = torch.autograd.grad(linear_logprob(*inputs, targets, impl="triton")[0].sum(), inputs[trained])
        torch.testing.assert_close(grad, expected[trained], rtol=1e-4, atol=1e-5)


def test_rows_that_descriptors_cannot_read_are_refused():
    with pytest.raises(ValueError, match="rows of 12 bytes"):
        linear_logprob(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 1]), impl="triton")


def test_rows_beyond_two_billion_elements(monkeypatch):
    """Program 0 is told that it is program 2^31 / V + 1: its row starts past the range of 32-bit offsets."""
    import sys

    from triton.runtime import interpreter

    module = sys.modules["megatron_rsi.kernels.logprob"]
    vocab, far = 4096, 2**31 // 4096 + 1
    logits = torch.empty(far + 1, vocab, dtype=torch.bfloat16)  # untouched pages take no memory
    logits[far] = torch.randn(vocab)
    column = torch.full((far + 1,), 7)
    stats, small = torch.zeros(5, far + 1), logits[far:].clone()
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (far, y, z)))
    module._stats_kernel[(1,)](logits, column, stats, far + 1, vocab, 1.0, ENTROPY=True, BLOCK=1024)
    maximum, total, weighted, target = stats[:4, far]
    expected = small.float()[0]
    assert maximum == expected.max() and target == expected[7]
    torch.testing.assert_close(total, (expected - maximum).exp().sum())
    coefficients = torch.ones(3, far + 1)
    module._gradient_kernel[(1,)](logits, logits, column, torch.ones(far + 1, dtype=torch.bool), stats[0], coefficients,
                                  far + 1, vocab, 1.0, ENTROPY=False, BLOCK=4096)
    dense = -(expected - maximum).exp()
    dense[7] += 1
    torch.testing.assert_close(logits[far], dense.bfloat16())
