"""One process: log-probs against transformers, packing, gradients, values, resume."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from policy_helpers import (
    NUM_TOKENS,
    OPTIMIZER,
    batch_of,
    biggest_difference,
    config,
    gradients,
    head,
    samples,
    step,
    tensors,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_rsi.batch import PackedBatch, make_batch
from megatron_rsi.critic import build_critic, inherit
from megatron_rsi.parallel import World
from megatron_rsi.policy import OptimizerConfig, Outputs, Policy
from megatron_rsi.settings import Layout
from megatron_rsi.weights import random_tensors

ALL = [0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def world() -> World:
    return World.init(device="cpu")


def make_actor(world: World, tied: bool = False, optimizer: OptimizerConfig = OPTIMIZER) -> Policy:
    policy = Policy(config(tied), world, optimizer)
    policy.load_hf(random_tensors(config(tied), seed=3, std=0.15))
    return policy


def make_critic(world: World, optimizer: OptimizerConfig = OPTIMIZER) -> Policy:
    return inherit(config(), world, [*random_tensors(config(), seed=3, std=0.15), *head().items()], optimizer)


def reference_model(policy: Policy) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(Qwen3Config(**policy.config.to_hf())).eval()
    left = model.load_state_dict(dict(policy.hf_tensors()), strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}
    return model


@torch.no_grad()
def brute_force(model: Qwen3ForCausalLM, batch: PackedBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence alone through transformers, full log-softmax."""
    logprob, entropy = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    bounds = batch.cu_seqlens.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        scores = (model(batch.tokens[start:end][None]).logits[0] / temperature).log_softmax(-1)
        logprob[start + 1 : end] = scores[:-1].gather(1, batch.tokens[start + 1 : end, None])[:, 0]
        entropy[start + 1 : end] = -(scores.exp() * scores).sum(-1)[:-1]
    return logprob * batch.mask, entropy * batch.mask


@pytest.mark.parametrize("tied", [False, True])
def test_logprobs_equal_transformers(world: World, tied: bool) -> None:
    policy = make_actor(world, tied)
    model, batch = reference_model(policy), batch_of(ALL)
    for temperature in (1.0, 0.6):
        ((logprob, entropy),) = policy.logprobs([batch], temperature, entropy=True)
        want, want_entropy = brute_force(model, batch, temperature)
        assert (logprob - want).abs().max() < 1e-5 and (entropy - want_entropy).abs().max() < 1e-5
        assert logprob[batch.mask].abs().min() > 0.01  # not trivially zero
        assert torch.count_nonzero(logprob[~batch.mask]) == 0


def test_packed_equals_alone(world: World) -> None:
    """Neighbours change nothing: [a b c | d e], c is never a predictor of d."""
    policy = make_actor(world)
    (packed,) = policy.logprobs([batch_of(ALL)], 0.9)
    alone = policy.logprobs([batch_of([i]) for i in ALL], 0.9)
    assert (packed - torch.cat(alone)).abs().max() < 1e-5


def test_gradient_equals_transformers(world: World) -> None:
    """The whole path, forward and backward, against autograd through transformers and a plain log-softmax."""
    policy = make_actor(world)
    model, batch = reference_model(policy), batch_of(ALL)
    coefficients = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    metrics = policy.train_step([batch], lambda out, b: ((out.logprob * coefficients).sum(), {}), lr=0.0)
    bounds, loss = batch.cu_seqlens.tolist(), torch.zeros(())
    for start, end in zip(bounds, bounds[1:], strict=False):
        scores = model(batch.tokens[start:end][None]).logits[0].log_softmax(-1)
        own = scores[:-1].gather(1, batch.tokens[start + 1 : end, None])[:, 0]
        loss = loss + (own * batch.mask[start + 1 : end] * coefficients[start + 1 : end]).sum()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    ours = gradients(policy)
    theirs = dict(model.named_parameters())
    pairs = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.layers.1.self_attention.q_layernorm.weight": "model.layers.1.self_attn.q_norm.weight",
        "decoder.layers.1.self_attention.k_layernorm.weight": "model.layers.1.self_attn.k_norm.weight",
        "decoder.layers.0.mlp.linear_fc2.weight": "model.layers.0.mlp.down_proj.weight",
        "decoder.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    for mine, theirs_name in pairs.items():
        want = theirs[theirs_name].grad
        assert (ours[mine] - want).abs().max() < 1e-5 * max(1.0, float(want.abs().max())), mine


def test_splitting_and_permuting_microbatches_leaves_gradients_unchanged(world: World) -> None:
    splits = [[ALL], [[0, 3], [1], [2, 4, 5]], [[5, 1], [4], [0, 2, 3]], [[i] for i in reversed(ALL)]]
    seen = []
    for split in splits:
        policy = make_actor(world)
        metrics = step(policy, [batch_of(numbers) for numbers in split])
        seen.append((metrics, gradients(policy)))
    for metrics, grads in seen[1:]:
        assert biggest_difference(grads, seen[0][1]) < 1e-5
        for name in ("loss", "grad_norm", "approx_kl_sum", "ratio_max", "ratio_min", "num_tokens"):
            assert metrics[name] == pytest.approx(seen[0][0][name], rel=1e-4, abs=1e-5), name
    assert seen[0][0]["num_tokens"] == NUM_TOKENS and seen[0][0]["grad_norm"] > 0.1


def test_empty_and_all_masked_microbatches_change_nothing(world: World) -> None:
    policy, padded = make_actor(world), make_actor(world)
    whole = batch_of(ALL)
    masked = whole.with_(mask=torch.zeros_like(whole.mask), advantages=torch.full((whole.num_tokens,), math.nan))
    step(policy, [whole])
    metrics = step(padded, [PackedBatch.empty(), whole, masked])
    assert math.isfinite(metrics["loss"]) and metrics["skipped_updates"] == 0
    assert biggest_difference(tensors(policy), tensors(padded)) == 0.0
    alone = make_actor(world)
    before = tensors(alone)
    metrics = step(alone, [masked, PackedBatch.empty()])
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0
    assert biggest_difference(before, tensors(alone)) == 0.0
    assert alone.logprobs([]) == []
    with pytest.raises(ValueError, match="no micro-batches"):
        step(alone, [])


def test_a_gradient_that_is_not_finite_is_not_applied(world: World) -> None:
    policy = make_actor(world)
    before = policy.weights_hash()
    metrics = policy.train_step([batch_of(ALL)], lambda out, b: (out.logprob.sum() * math.inf, {}), lr=0.1)
    assert metrics["skipped_updates"] == 1.0 and policy.weights_hash() == before and policy.num_steps == 0
    assert step(policy, [batch_of(ALL)])["skipped_updates"] == 0.0
    assert policy.weights_hash() != before and policy.num_steps == 1


def test_clipping_scales_the_whole_gradient(world: World) -> None:
    free = make_actor(world, optimizer=OptimizerConfig(eps=1e6, clip_grad=0.0))
    clipped = make_actor(world, optimizer=OptimizerConfig(eps=1e6, clip_grad=0.01))
    start = tensors(free)
    norm = step(free, [batch_of(ALL)], lr=1e6)["grad_norm"]  # with this eps the update is the gradient
    assert step(clipped, [batch_of(ALL)], lr=1e6)["grad_norm"] == pytest.approx(norm)
    for name, tensor in tensors(free).items():
        scaled = (tensors(clipped)[name] - start[name]) * (norm / 0.01)
        assert torch.allclose(scaled, tensor - start[name], atol=2e-3 * norm), name


def test_one_kl_step_moves_the_policy_towards_its_reference(world: World) -> None:
    policy, batch = make_actor(world), batch_of(ALL)
    (start,) = policy.logprobs([batch])
    target = (start - 0.5) * batch.mask  # a reference that finds these tokens less likely

    def loss(out: Outputs, b: PackedBatch) -> tuple[torch.Tensor, dict]:
        from megatron_rsi.kernels import ppo_loss

        zero = torch.zeros(b.num_tokens)
        return ppo_loss(out.logprob, start, zero, b.mask, ref_logprob=target, kl_coef=1.0, num_tokens_global=NUM_TOKENS)

    policy.train_step([batch], loss, lr=0.01)
    (after,) = policy.logprobs([batch])
    mask = batch.mask
    assert (after - target)[mask].abs().mean() < (start - target)[mask].abs().mean() - 1e-4


def test_values_are_read_at_the_predicting_state_and_ignore_temperature(world: World) -> None:
    critic, actor = make_critic(world), make_actor(world)
    batch, weights = batch_of(ALL), head()
    with torch.no_grad():
        hidden = []
        bounds = batch.cu_seqlens.tolist()
        body = reference_model(actor).model
        for start, end in zip(bounds, bounds[1:], strict=False):
            hidden.append(body(batch.tokens[start:end][None]).last_hidden_state[0])
        states = torch.cat(hidden) @ weights["value_head.weight"][0] + weights["value_head.bias"]
    (values,) = critic.values([batch])
    want = torch.zeros(batch.num_tokens)
    want[1:] = states[:-1]
    assert (values - want * batch.mask).abs().max() < 1e-5
    assert values[batch.mask].std() > 0.01
    seen = []
    for temperature in (0.3, 1.0, 2.0):
        critic.train_step(
            [batch],
            lambda out, b: (out.values.sum(), seen.append(out.values.detach()) or {}),
            0.0,
            temperature=temperature,
        )
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2]) and torch.equal(seen[0], values)
    with pytest.raises(ValueError, match="critic has no log-probs"):
        critic.logprobs([batch])
    with pytest.raises(ValueError, match="no value head"):
        actor.values([batch])


def test_only_action_rows_reach_the_head_and_no_full_logits_exist(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_rsi import policy as module

    rows, real = [], module.linear_logprob
    monkeypatch.setattr(module, "linear_logprob", lambda h, *a, **k: rows.append(h.shape[0]) or real(h, *a, **k))
    policy = make_actor(world)
    policy.logprobs([batch_of(ALL)])
    assert rows == [NUM_TOKENS] and batch_of(ALL).num_tokens > NUM_TOKENS


@pytest.mark.parametrize("kind", ["adamw", "muon", "critic"])
def test_state_restored_next_step_equal(world: World, kind: str) -> None:
    optimizer = OptimizerConfig(kind="muon", muon_lr_ratio=2.0) if kind == "muon" else OptimizerConfig(eps=1e-4)

    def make() -> Policy:
        return make_critic(world, optimizer) if kind == "critic" else make_actor(world, optimizer=optimizer)

    policy, batches = make(), [batch_of(ALL)]
    for _ in range(2):
        step(policy, batches, lr=1e-3)
    state = policy.state_dict()
    step(policy, batches, lr=1e-3)
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.num_steps == 2
    step(resumed, batches, lr=1e-3)
    assert policy.weights_hash() == resumed.weights_hash()
    fresh = make()
    fresh.load_hf(dict(state_tensors(world, state, make)))
    step(fresh, batches, lr=1e-3)
    assert fresh.weights_hash() != policy.weights_hash()  # the optimizer state matters
    other = Policy(config(), world, dataclasses.replace(optimizer, kind="adamw" if kind == "muon" else "muon"))
    with pytest.raises(ValueError, match="was saved with"):
        other.load_state_dict(state)


def state_tensors(world: World, state: dict, make: object) -> dict[str, torch.Tensor]:
    policy = make()  # type: ignore[operator]
    policy.load_state_dict(state)
    return tensors(policy)


def test_muon_learns_and_splits_matrices_from_the_rest(world: World) -> None:
    policy = make_actor(world, optimizer=OptimizerConfig(kind="muon", muon_lr_ratio=5.0))
    batches = [batch_of(ALL)]

    def imitate(out: Outputs, b: PackedBatch) -> tuple[torch.Tensor, dict]:
        return -out.logprob.sum() / NUM_TOKENS, {}

    losses = [policy.train_step(batches, imitate, 3e-3)["loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.5
    muon, adamw = policy._torch_optimizers()
    assert sum(len(g["params"]) for g in muon.param_groups) == 4 * config().num_hidden_layers
    assert muon.param_groups[0]["lr"] == pytest.approx(1.5e-2) and adamw.param_groups[0]["lr"] == pytest.approx(3e-3)


def test_bfloat16_keeps_float32_masters(world: World) -> None:
    exact = make_actor(world)
    half = make_actor(world, optimizer=OptimizerConfig(bf16=True, eps=0.1, clip_grad=0.0))
    (a,), (b,) = exact.logprobs([batch_of(ALL)]), half.logprobs([batch_of(ALL)])
    assert 0 < (a - b).abs().max() < 0.2
    before = tensors(half)
    for _ in range(40):  # each step is far below one bfloat16 rounding unit of a weight near 1
        step(half, [batch_of(ALL)], lr=2e-4)
    state = half.state_dict()
    drift = max(float((m.float() - m.to(torch.bfloat16).float()).abs().max()) for ms in state["masters"] for m in ms)
    assert drift > 0 and biggest_difference(before, tensors(half)) > 0
    resumed = make_actor(world, optimizer=OptimizerConfig(bf16=True, eps=0.1, clip_grad=0.0))
    resumed.load_state_dict(state)
    for policy in (half, resumed):
        step(policy, [batch_of(ALL)], lr=2e-2)
    assert half.weights_hash() == resumed.weights_hash()


def test_critic_starts_at_zero_and_learns_without_touching_the_actor(world: World) -> None:
    actor = make_actor(world, tied=True)
    digest = actor.weights_hash()
    critic = build_critic(config(tied=True), world, actor.hf_tensors(), OptimizerConfig(eps=1e-4))
    batch = batch_of(ALL)
    (values,) = critic.values([batch])
    assert torch.count_nonzero(values) == 0
    target = batch.with_(values=values, returns=0.7 * batch.mask)
    losses = [
        step(critic, [target.with_(values=critic.values([target])[0])], lr=3e-3)["value_loss_sum"] for _ in range(25)
    ]
    assert losses[-1] < 0.2 * losses[0]
    assert actor.weights_hash() == digest


def test_the_number_format_follows_the_configuration(world: World) -> None:
    assert OptimizerConfig.of(Layout(), world) == OptimizerConfig() and not OptimizerConfig.of(Layout(), world).bf16
    assert OptimizerConfig.of(Layout(dtype="bfloat16"), world, clip_grad=0.5) == OptimizerConfig(bf16=True, clip_grad=0.5)
    gpus = dataclasses.replace(world, device=torch.device("cuda"), dp=2)
    assert OptimizerConfig.of(Layout(), gpus) == OptimizerConfig(bf16=True, distributed=True)
    assert OptimizerConfig.of(Layout(dtype="float32"), gpus) == OptimizerConfig(distributed=True)


def test_megatrons_own_settings_reach_actor_and_critic(world: World) -> None:
    overrides = {"layernorm_epsilon": 0.5}
    actor = Policy(config(), world, megatron=overrides)
    critic = build_critic(config(), world, random_tensors(config()), megatron=overrides)
    inherited = inherit(config(), world, critic.hf_tensors(), megatron=overrides)
    assert {p.model.config.layernorm_epsilon for p in (actor, critic, inherited)} == {0.5}


def test_settings_are_checked(world: World) -> None:
    with pytest.raises(ValueError, match="unknown optimizer 'sgd'"):
        OptimizerConfig(kind="sgd")
    with pytest.raises(ValueError, match="unknown keys: no_such_key"):
        Policy(config(), world, megatron={"no_such_key": 1})
    with pytest.raises(ValueError, match="begins with a sampled token"):
        first = samples()[0]
        make_batch([dataclasses.replace(first, mask=[True] + first.mask[1:])])
