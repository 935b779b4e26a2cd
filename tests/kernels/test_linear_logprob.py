"""logprob and linear_logprob against float64 log-softmax: values, gradients, masks, odd inputs, memory."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rsi.kernels import linear_logprob, logprob
from megatron_rsi.kernels._count import LiveBytes

DOUBLE = torch.float64
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def reference(scores, targets, live):
    """(log-prob, entropy) by log_softmax in float64, 0 on rows that are not live."""
    log_p = scores.log_softmax(1)
    picked = log_p.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    entropy = -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(1)
    return torch.where(live, picked, 0.0), torch.where(live, entropy, 0.0)


def problem(num_tokens=37, hidden_size=16, vocab=23, dtype=DOUBLE, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=g, dtype=DOUBLE).to(dtype)
    weight = (torch.randn(vocab, hidden_size, generator=g, dtype=DOUBLE) * scale).to(dtype)
    targets = torch.randint(0, vocab, (num_tokens,), generator=g)
    mask = torch.rand(num_tokens, generator=g) < 0.6
    grads = torch.randn(2, num_tokens, generator=g, dtype=DOUBLE)
    return hidden, weight, targets, mask, grads


def backward_of(outputs, inputs, grads):
    loss = sum((out.double() * grad).sum() for out, grad in zip(outputs, grads, strict=False) if out is not None)
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows_that_fit", [1, 7, 1000])
@pytest.mark.parametrize("vocab", [1, 23, 259])
def test_linear_logprob_equals_log_softmax(dtype, entropy, temperature, rows_that_fit, vocab):
    hidden, weight, targets, mask, grads = problem(vocab=vocab, dtype=dtype)
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected = reference(h64 @ w64.t() / temperature, targets, mask)[: 1 + entropy]
    expected_grads = backward_of(expected, (h64, w64), grads)
    hidden.requires_grad_(), weight.requires_grad_()
    got = linear_logprob(hidden, weight, targets, mask=mask, temperature=temperature, entropy=entropy,
                         max_workspace_bytes=rows_that_fit * vocab * 8)
    assert got[0].dtype == (DOUBLE if dtype == DOUBLE else torch.float32) and (got[1] is not None) == entropy
    got_grads = backward_of(got, (hidden, weight), grads)
    forward_tolerance = min(TOLERANCE[dtype], 2e-5)  # half-precision inputs are exact, the sums are float32
    for a, b in zip(got, expected, strict=False):
        torch.testing.assert_close(a.double(), b, atol=forward_tolerance, rtol=forward_tolerance)
    for a, b, like in zip(got_grads, expected_grads, (hidden, weight), strict=True):
        assert a.dtype == like.dtype
        torch.testing.assert_close(a.double(), b, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("inplace", [False, True])
def test_logprob_equals_log_softmax(dtype, entropy, temperature, inplace):
    hidden, weight, targets, _, grads = problem(vocab=259)
    targets[::5] = -100
    scores = (hidden @ weight.t()).to(dtype)
    exact = scores.double().requires_grad_()
    expected = reference(exact / temperature, targets, targets != -100)[: 1 + entropy]
    (expected_grad,) = backward_of(expected, (exact,), grads)
    leaf = scores.clone().requires_grad_()
    logits = leaf * 1  # inplace_grad must not be given a leaf
    got = logprob(logits, targets, temperature=temperature, entropy=entropy, inplace_grad=inplace)
    assert torch.equal(logits.detach(), scores)
    (grad,) = backward_of(got, (leaf,), grads)
    assert torch.equal(logits.detach(), scores) != inplace
    for a, b in zip(got, expected, strict=False):
        torch.testing.assert_close(a.double(), b, atol=min(TOLERANCE[dtype], 2e-5), rtol=1e-5)
    torch.testing.assert_close(grad.double(), expected_grad, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_inplace_gradient_allows_one_backward():
    logits = (torch.randn(3, 5).requires_grad_() * 1)
    out, _ = logprob(logits, torch.tensor([0, 1, 2]), inplace_grad=True)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwritten by the first backward"):
        out.sum().backward()


def test_second_backward_of_linear_logprob_is_the_same():
    hidden, weight, targets, mask, _ = problem()
    hidden.requires_grad_()
    out, _ = linear_logprob(hidden, weight, targets, mask=mask)
    first = torch.autograd.grad(out.sum(), hidden, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(out.sum(), hidden)[0], first)


@pytest.mark.parametrize("workspace", [1 << 20, 23 * 8 * 3])
def test_gradcheck(workspace):
    hidden, weight, targets, mask, _ = problem(num_tokens=11)
    hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprob(h, w, targets, mask=mask, temperature=0.7, entropy=True,
                                    max_workspace_bytes=workspace), (hidden, weight))
    scores = (hidden @ weight.t()).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: logprob(z, targets, temperature=0.7, entropy=True), (scores,))


def odd_rows(vocab=19):
    """Rows that broke other kernels: all negative, huge, -inf entries, one finite entry, ties, a dominant target."""
    rows = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    rows[0] -= 1e4
    rows[1] += 1e4
    rows[2, ::2] = -torch.inf
    rows[3] = -torch.inf
    rows[3, 5] = -3.0
    rows[4] = 0.0
    rows[5, 5] = 800.0
    rows[6, 7] = 800.0
    rows[7] *= 1e3
    return rows, torch.full((8,), 5)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_odd_rows(dtype):
    rows, targets = odd_rows()
    rows = rows.to(dtype)
    exact = rows.double().requires_grad_()
    expected = reference(exact, targets, torch.ones(8, dtype=torch.bool))
    expected_grad = (exact.softmax(1) - F.one_hot(targets, 19)).neg()
    logits = rows.clone().requires_grad_()
    got = logprob(logits, targets, entropy=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.detach(), rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(got[0].sum() + 0 * got[1].sum(), logits)
    torch.testing.assert_close(grad.double(), expected_grad.detach(), rtol=1e-5, atol=2e-6)
    got = logprob(logits, targets, entropy=True)
    (grad,) = torch.autograd.grad(got[1].sum(), logits)
    assert grad.isfinite().all()


def test_target_of_minus_infinity_has_log_prob_minus_infinity():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    assert logprob(logits, torch.tensor([1]))[0].item() == -torch.inf


def test_equal_negative_scores_of_an_odd_vocabulary():
    """A vocabulary that is no multiple of any tile must not pad with zeros: log-prob is -log V exactly."""
    for vocab in (1, 2, 127, 129, 1000, 1025):
        out, entropy = logprob(torch.full((2, vocab), -50.0), torch.zeros(2, dtype=torch.long), entropy=True)
        torch.testing.assert_close(out, -torch.full((2,), float(vocab)).log())
        torch.testing.assert_close(entropy, -out)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_masked_rows_leave_before_the_product(garbage):
    hidden, weight, targets, mask, grads = problem()
    dirty, lost = hidden.clone(), targets.clone()
    dirty[~mask], lost[~mask] = garbage, 10**9
    results = []
    for h, t in ((hidden, targets), (dirty, lost)):
        h.requires_grad_()
        w = weight.clone().requires_grad_()
        out = linear_logprob(h, w, t, mask=mask, entropy=True)
        results.append((*out, *backward_of(out, (h, w), grads)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert all((x[~mask] == 0).all() for x in results[1][:3])


def test_ignore_index_is_a_mask():
    hidden, weight, targets, mask, _ = problem()
    by_index = linear_logprob(hidden, weight, torch.where(mask, targets, -100), entropy=True)
    by_mask = linear_logprob(hidden, weight, targets, mask=mask, entropy=True)
    for a, b in zip(by_index, by_mask, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_no_row_and_no_live_row(num_tokens):
    hidden, weight, targets, _, _ = problem(num_tokens=num_tokens)
    hidden.requires_grad_(), weight.requires_grad_()
    out, entropy = linear_logprob(hidden, weight, targets, mask=torch.zeros(num_tokens, dtype=torch.bool), entropy=True)
    (out.sum() + entropy.sum()).backward()
    assert out.shape == entropy.shape == (num_tokens,) and (out == 0).all() and (hidden.grad == 0).all()
    assert hidden.grad.shape == hidden.shape and (weight.grad == 0).all()
    scores = torch.randn(num_tokens, 7, requires_grad=True)
    out, entropy = logprob(scores, torch.full((num_tokens,), -100), entropy=True)
    (out.sum() + entropy.sum()).backward()
    assert (out == 0).all() and (entropy == 0).all() and (scores.grad == 0).all()


def test_inputs_are_unchanged():
    hidden, weight, targets, mask, grads = problem(dtype=torch.float32)
    before = [x.clone() for x in (hidden, weight, targets, mask)]
    hidden.requires_grad_(), weight.requires_grad_()
    out = linear_logprob(hidden, weight, targets, mask=mask, entropy=True)
    backward_of(out, (hidden, weight), grads)
    assert all(torch.equal(a, b) for a, b in zip((hidden, weight, targets, mask), before, strict=True))


def test_non_contiguous_inputs():
    hidden, weight, targets, mask, grads = problem(dtype=torch.float32)
    strided = [x.t().contiguous().t().requires_grad_() for x in (hidden, weight)]
    hidden.requires_grad_(), weight.requires_grad_()
    a = linear_logprob(hidden, weight, targets, mask=mask)
    b = linear_logprob(*strided, targets, mask=mask)
    torch.testing.assert_close(a[0], b[0])
    for x, y in zip(backward_of(a, (hidden, weight), grads), backward_of(b, strided, grads), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("entropy", [False, True])
def test_no_tensor_of_tokens_by_vocabulary_is_ever_allocated(entropy):
    num_tokens, hidden_size, vocab, workspace = 1500, 8, 4001, 4 << 20
    hidden, weight, targets, _, grads = problem(num_tokens, hidden_size, vocab, torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    with LiveBytes() as seen:
        out = linear_logprob(hidden, weight, targets, entropy=entropy, max_workspace_bytes=workspace)
        backward_of(out, (hidden, weight), grads)
    assert workspace - 256 * vocab * 4 < seen.largest <= workspace < num_tokens * vocab * 4 / 5


def forward_and_backward(function, hidden, weight):
    with LiveBytes() as seen:
        torch.autograd.grad(function(hidden, weight).sum(), (hidden, weight))
    return seen.peak


@pytest.mark.parametrize("shape", [(2000, 128, 768), (2048, 256, 8192)])
def test_peak_memory_is_below_15_percent_of_the_plain_path(shape):
    """The plain path holds three [T, V]: the scores' log-softmax, its gradient and that of the scores."""
    num_tokens, hidden_size, vocab = shape
    hidden, weight = torch.randn(num_tokens, hidden_size), torch.randn(vocab, hidden_size) * 0.1
    hidden.requires_grad_(), weight.requires_grad_()
    targets, scores_bytes = torch.arange(num_tokens) % vocab, num_tokens * vocab * 4
    plain = forward_and_backward(
        lambda h, w: (h @ w.t()).log_softmax(1).gather(1, targets[:, None]), hidden, weight)
    ours = forward_and_backward(
        lambda h, w: linear_logprob(h, w, targets, max_workspace_bytes=scores_bytes // 5)[0], hidden, weight)
    assert 3 * scores_bytes <= plain < 3.01 * scores_bytes
    assert ours <= 0.15 * plain


def test_peak_memory_is_the_workspace_the_gradients_and_a_few_rows():
    """Backward: a chunk of scores, both gradients, the statistics; forward: a chunk and a cached copy of rows."""
    num_tokens, hidden_size, vocab, chunk = 3000, 32, 2000, 300
    hidden, weight = torch.randn(num_tokens, hidden_size), torch.randn(vocab, hidden_size)
    hidden.requires_grad_(), weight.requires_grad_()
    peak = forward_and_backward(lambda h, w: linear_logprob(
        h, w, torch.zeros(num_tokens, dtype=torch.long), max_workspace_bytes=chunk * vocab * 4)[0], hidden, weight)
    gradients = (num_tokens + vocab) * hidden_size * 4
    per_token = 17 * 8 * num_tokens  # targets, columns, statistics, coefficients: never a multiple of V
    assert chunk * vocab * 4 + gradients < peak <= chunk * vocab * 4 + max(gradients, 1 << 20) + per_token


@pytest.mark.parametrize("change,message", [
    (dict(hidden=torch.zeros(4)), "hidden: "),
    (dict(hidden=torch.zeros(4, 8, dtype=torch.int32)), "hidden: torch.int32"),
    (dict(weight=torch.zeros(5, 7)), "with H=8 of hidden"),
    (dict(weight=torch.zeros(5, 8, dtype=torch.bfloat16)), "weight: dtype torch.bfloat16"),
    (dict(targets=torch.zeros(3, dtype=torch.long)), r"targets: shape \(3,\), expected \(4,\)"),
    (dict(targets=torch.zeros(4, dtype=torch.int32)), "targets: dtype torch.int32"),
    (dict(targets=torch.tensor([0, 1, 5, 0])), r"targets: 5 lies outside the vocabulary \[0, 5\)"),
    (dict(targets=torch.tensor([0, 1, -1, 0])), "targets: -1 lies outside"),
    (dict(vocab_start=2), r"targets: 0 lies outside the vocabulary \[2, 7\)"),
    (dict(mask=torch.ones(4)), "mask: dtype torch.float32"),
    (dict(mask=torch.ones(5, dtype=torch.bool)), r"mask: shape \(5,\)"),
    (dict(temperature=0.0), r"temperature=0.0: must be a finite number in \(0.0"),
    (dict(temperature=float("nan")), "temperature=nan"),
    (dict(max_workspace_bytes=19), "one row of V=5 scores takes 20"),
    (dict(impl="triton"), "needs CUDA tensors|triton is not installed"),
    (dict(impl="x"), "choose one of"),
])
def test_wrong_arguments_are_refused_with_what_to_change(change, message):
    arguments = dict(hidden=torch.zeros(4, 8), weight=torch.zeros(5, 8), targets=torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=message):
        linear_logprob(**{**arguments, **change})
    logits = {k: v for k, v in change.items() if k in ("targets", "vocab_start", "temperature", "impl")}
    if logits:
        with pytest.raises(ValueError, match=message):
            logprob(**{**dict(logits=torch.zeros(4, 5), targets=arguments["targets"]), **logits})
