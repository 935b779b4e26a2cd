"""The interpreter's bfloat16 equals torch's: casts round to nearest even, dots multiply values."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def cast_kernel(source, target, N: tl.constexpr):
    offset = tl.arange(0, N)
    tl.store(target + offset, tl.load(source + offset).to(target.dtype.element_ty))


@triton.jit
def dot_kernel(a, b, out, N: tl.constexpr):
    index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + index, tl.dot(tl.load(a + index), tl.load(b + index)))


@triton.jit
def double_kernel(source, target, N: tl.constexpr):
    offset = tl.arange(0, N)
    tl.store(target + offset, tl.load(source + offset) + tl.load(source + offset))


@pytest.mark.parametrize("other", [torch.float32, torch.float16])
def test_casts_both_ways(other):
    numbers = torch.cat([torch.randn(60), torch.tensor([0.0, torch.inf, -torch.inf, 1.00390625])]).to(other)
    down = torch.empty(64, dtype=torch.bfloat16)
    cast_kernel[(1,)](numbers, down, 64)
    assert torch.equal(down, numbers.to(torch.bfloat16))
    up = torch.empty(64, dtype=other)
    cast_kernel[(1,)](down, up, 64)
    assert torch.equal(up, down.to(other))


def test_dot():
    a, b = torch.randn(2, 32, 32).bfloat16()
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, 32)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_other_arithmetic_is_refused():
    with pytest.raises(InterpreterError, match="cast to float32 first"):
        double_kernel[(1,)](torch.ones(8).bfloat16(), torch.ones(8).bfloat16(), 8)
