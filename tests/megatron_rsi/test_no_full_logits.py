"""A train step allocates no tensor of tokens by vocabulary: neither of all tokens nor of the action tokens."""

from __future__ import annotations

from functools import partial

import pytest
from policy_helpers import OPTIMIZER, batch_of, config, step

from megatron_rsi import policy as module
from megatron_rsi.kernels._count import LiveBytes
from megatron_rsi.parallel import World
from megatron_rsi.policy import Policy
from megatron_rsi.weights import random_tensors

VOCAB, WORKSPACE_BYTES = 3000, 1 << 20


def test_the_largest_tensor_of_a_train_step_is_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "linear_logprob", partial(module.linear_logprob, max_workspace_bytes=WORKSPACE_BYTES))
    wide = config(vocab_size=VOCAB)
    policy = Policy(wide, World.init(device="cpu"), OPTIMIZER)
    policy.load_hf(random_tensors(wide, seed=3, std=0.15))
    batch = batch_of([1, 5, 3, 0] * 20)
    with LiveBytes() as seen:
        step(policy, [batch])
    action_scores_bytes = int(batch.mask.sum()) * VOCAB * 4
    assert seen.largest <= WORKSPACE_BYTES < action_scores_bytes / 7
