"""Names and layouts: cutting and joining are inverse to the bit, configs are read, written and refused."""

from __future__ import annotations

import pytest
import torch
from policy_helpers import SHAPE, config, head, tensors

from megatron_rsi.critic import build_critic
from megatron_rsi.parallel import World
from megatron_rsi.policy import ModelConfig, Policy
from megatron_rsi.weights import random_tensors, rules, shard, unshard


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("value_head", [False, True])
def test_cutting_and_joining_are_inverse(tp: int, value_head: bool) -> None:
    shape = config()
    given = dict(random_tensors(shape, seed=1)) | (head() if value_head else {})
    for rule in rules(shape, value_head):
        full = [given[name] for name in rule.names]
        shards = [shard(rule, full, shape, rank, tp) for rank in range(tp)]
        for name, tensor in zip(rule.names, unshard(rule, shards, shape), strict=True):
            assert torch.equal(tensor, given[name]), name
        if rule.cut != "copy" and tp == 2:
            assert sum(s.numel() for s in shards) == sum(t.numel() for t in full)


def test_qkv_is_interleaved_by_group() -> None:
    """Worked case: 4 query heads in 2 groups, head_dim 8: [q0 q1 k0 v0 | q2 q3 k1 v1]; a rank gets whole groups."""
    shape = config()
    rule = next(r for r in rules(shape) if r.cut == "qkv")
    q = torch.arange(4).repeat_interleave(8)[:, None].expand(32, 32)
    k, v = (base + torch.arange(2).repeat_interleave(8)[:, None].expand(16, 32) for base in (10, 20))
    for rank, want in ((0, [0, 1, 10, 20]), (1, [2, 3, 11, 21])):
        assert shard(rule, [q, k, v], shape, rank, 2)[::8, 0].tolist() == want


def test_round_trip_and_refusals() -> None:
    world = World.init(device="cpu")
    given = dict(random_tensors(config(), seed=1))
    policy = Policy(config(), world)
    policy.load_hf(given)
    back = tensors(policy)
    assert list(back) == list(given) and all(torch.equal(back[n], given[n]) for n in given)
    assert policy.num_parameters == sum(t.numel() for t in given.values())
    short = {n: t for n, t in given.items() if n != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"missing model.norm.weight, unexpected model.extra"):
        policy.load_hf(short | {"model.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\), the model needs \(32,\)"):
        policy.load_hf(given | {"model.norm.weight": torch.zeros(3)})
    assert all(torch.equal(t, given[n]) for n, t in policy.hf_tensors())  # a refused load changes nothing
    digest = policy.weights_hash()
    policy.load_hf(given | {"model.norm.weight": given["model.norm.weight"] + 1e-7})
    assert policy.weights_hash() != digest
    critic = build_critic(config(), world, given)
    assert set(tensors(critic)) == set(given) - {"lm_head.weight"} | {"value_head.weight", "value_head.bias"}
    tied = Policy(config(tied=True), world)
    tied.load_hf(given)  # the head of a tied model is its embedding; a stored copy is ignored
    assert "lm_head.weight" not in tensors(tied)


def test_config_round_trip_and_refusals() -> None:
    for tied in (False, True):
        assert ModelConfig.from_hf(config(tied).to_hf()) == config(tied)
    stored = config().to_hf()
    assert stored["architectures"] == ["Qwen3ForCausalLM"] and stored["head_dim"] == 8
    old_style = {k: v for k, v in stored.items() if k != "rope_parameters"}
    assert ModelConfig.from_hf(old_style).rope_theta == SHAPE["rope_theta"]
    for change, message in (
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_attention_heads": 3}, "multiple of num_key_value_heads = 2"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_hf(stored | change)


def test_shapes_that_cannot_be_cut_are_named() -> None:
    with pytest.raises(ValueError, match="num_attention_heads = 4 is not divisible by tensor parallel size 3"):
        config().check_parallel(tp=3, pp=1)
    with pytest.raises(ValueError, match="num_key_value_heads = 2 is not divisible by tensor parallel size 4"):
        config().check_parallel(tp=4, pp=1)
    with pytest.raises(ValueError, match="vocab_size = 71"):
        config(vocab_size=71).check_parallel(tp=2, pp=1)
    with pytest.raises(ValueError, match="2 layers cannot be cut into 3"):
        config().check_parallel(tp=1, pp=3)


def test_fresh_weights_depend_on_names_and_seed_only() -> None:
    one, again, other = (dict(random_tensors(config(), seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[n], again[n]) for n in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert one["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert one["model.layers.0.mlp.down_proj.weight"].std() == pytest.approx(0.02 / 4**0.5, rel=0.1)
    assert torch.all(one["model.norm.weight"] == 1)
