"""Exact counts of every op: launches, bytes asked for and bytes written by the lanes of its Triton kernels.

The interpreter sees each load and store with its mask. A byte asked for twice counts twice, whether or not a cache would
serve it; descriptor (TMA) loads count the part inside the tensor.
"""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from megatron_rsi.kernels import linear_logprob, logprob, ppo_loss, tb_gae
from megatron_rsi.kernels.linear_logprob import _NUM_SPLITS, INTERPRETER_TILE
from megatron_rsi.kernels.logprob import _columns
from megatron_rsi.kernels.ppo_loss import BLOCK_TOKENS, metric_names


@pytest.fixture
def counts(monkeypatch):
    seen = Counter()

    def load(self, pointers, mask, other, cache_modifier, eviction_policy, is_volatile):
        seen["read"] += int(np.sum(mask.data)) * item_bytes(pointers)
        return plain_load(self, pointers, mask, other, cache_modifier, eviction_policy, is_volatile)

    def store(self, pointers, value, mask, cache_modifier, eviction_policy):
        seen["written"] += int(np.sum(mask.data)) * item_bytes(pointers)
        return plain_store(self, pointers, value, mask, cache_modifier, eviction_policy)

    def launch(self, *arguments, **options):
        seen["launches"] += 1
        return plain_launch(self, *arguments, **options)

    plain_load, plain_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    plain_launch = GridExecutor.__call__
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", store)
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    return seen


def item_bytes(pointers):
    return max(8, pointers.get_element_ty().primitive_bitwidth) // 8  # a bool is one bit and takes a byte


def take(counts):
    seen = dict(counts)
    counts.clear()
    return seen


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_tb_gae_reads_each_token_and_its_follower_once(counts, integers):
    lengths = [0, 1, 64, 200]
    num, offsets = sum(lengths), torch.tensor([0, 0, 1, 65, 265]).to(integers)
    mask = torch.rand(num) < 0.6
    live = [int(part.sum()) for part in mask.split(lengths)]
    tb_gae(torch.randn(num), torch.randn(num), mask, torch.zeros(num).to(integers), offsets, impl="triton")
    wide = integers.itemsize
    following = sum(max(n - 1, 0) for n in live)
    masks = num + sum(max(n - 1, 0) for n in lengths)
    read = masks + sum(live) * (4 + 4 + wide) + following * (4 + wide) + len(lengths) * (2 * wide + 4)
    assert take(counts) == {"launches": 1, "read": read, "written": 8 * num}


@pytest.mark.parametrize("everything", [False, True])
def test_ppo_loss_reads_each_live_input_once_and_writes_each_gradient_once(counts, everything):
    num = 2 * BLOCK_TOKENS + 77
    x = {name: torch.randn(num) for name in ("old_logprob", "advantages", "old_values", "returns")}
    names, trained = metric_names(True, everything, everything, everything, True), ["logprob", "values"]
    if everything:
        x.update({name: torch.randn(num) for name in ("ref_logprob", "engine_logprob", "weights")})
        trained.append("entropy")
    x.update({name: torch.randn(num, requires_grad=True) for name in trained})
    mask = torch.rand(num) < 0.5
    loss, _ = ppo_loss(**x, mask=mask, num_tokens_global=num, impl="triton")
    loss.backward()
    blocks = math.ceil(num / BLOCK_TOKENS)
    assert take(counts) == {"launches": 1, "read": num + 4 * len(x) * int(mask.sum()),
                            "written": 4 * num * len(trained) + 4 * blocks * (len(names) + 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_logprob_reads_the_logits_once_forward_and_once_backward(counts, dtype, entropy):
    num_tokens, vocab, size = 6, 300, dtype.itemsize
    logits = torch.randn(num_tokens, vocab).to(dtype).requires_grad_()
    targets = torch.tensor([0, 299, -100, 5, 5, -100])
    out = logprob(logits, targets, entropy=entropy, impl="triton")
    assert take(counts) == {"launches": 1, "read": num_tokens * (8 + vocab * size) + 4 * size,
                            "written": num_tokens * 16}
    (out[0].sum() + (out[1].sum() if entropy else 0)).backward()
    blocks = math.ceil(vocab / _columns(vocab))
    assert take(counts) == {"launches": 1, "read": num_tokens * blocks * (1 + 8 + 16) + 4 * vocab * size,
                            "written": num_tokens * vocab * size}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slices", [1, 3])
def test_linear_logprob_reads_tiles_and_writes_no_scores_forward(counts, dtype, slices):
    num_tokens, hidden_size, vocab, size = 40, 48, 300, dtype.itemsize
    hidden = torch.randn(num_tokens, hidden_size).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden_size).to(dtype).requires_grad_()
    mask = torch.arange(num_tokens) < 35
    rows, tile = 35, INTERPRETER_TILE
    width = math.ceil(vocab / slices / tile.columns) * tile.columns
    out, _ = linear_logprob(hidden, weight, torch.arange(num_tokens), mask=mask, impl="triton",
                            max_workspace_bytes=max(vocab * 4, rows * width * size))
    row_tiles, column_tiles = math.ceil(rows / tile.rows), math.ceil(vocab / tile.columns)
    splits = math.ceil(column_tiles / math.ceil(column_tiles / _NUM_SPLITS))
    products = (rows * column_tiles + vocab * row_tiles) * hidden_size * size
    assert take(counts) == {"launches": 1, "read": products + rows * splits * 8, "written": rows * splits * 16}
    out.sum().backward()
    assert take(counts) == {"launches": math.ceil(vocab / width),
                            "read": products + rows * column_tiles * 2 * (8 + 16), "written": rows * vocab * size}
