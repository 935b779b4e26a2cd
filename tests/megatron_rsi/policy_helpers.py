"""Shared by the policy tests and by the worker that torchrun starts: small models, batches and losses."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rsi.batch import PackedBatch, Sample, make_batch
from megatron_rsi.kernels import ppo_loss
from megatron_rsi.policy import ModelConfig, OptimizerConfig, Outputs, Policy

SHAPE = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=70,
    rope_theta=1e4,
    max_position_embeddings=128,
)
# A large eps keeps the first AdamW step proportional to the gradient, so that it can be compared to 1e-5.
OPTIMIZER = OptimizerConfig(eps=0.1, clip_grad=0.0)


def config(tied: bool = False, **changes: object) -> ModelConfig:
    return ModelConfig(**{**SHAPE, "tie_word_embeddings": tied, **changes})  # type: ignore[arg-type]


def sample(number: int, length: int) -> Sample:
    """Ragged turns: context and action runs of varying length, ending in an action."""
    g = torch.Generator().manual_seed(number)
    mask, turn_ids, turn = [False] * 2, [0] * 2, 0
    while len(mask) < length:
        context, action = torch.randint(1, 4, (2,), generator=g).tolist()
        mask += [False] * context + [True] * action
        turn_ids += [turn] * (context + action)
        turn += 1
    mask, turn_ids = mask[:length], turn_ids[:length]
    mask[-1] = True
    tokens = torch.randint(0, SHAPE["vocab_size"], (length,), generator=g).tolist()
    logprobs = [-4.0 if m else 0.0 for m in mask]
    return Sample(str(number), tokens, mask, turn_ids, logprobs, reward=float(number % 2))


def samples() -> list[Sample]:
    return [sample(i, n) for i, n in enumerate((9, 31, 4, 17, 12, 23))]


def batch_of(numbers: list[int]) -> PackedBatch:
    """A batch with everything PPO needs; tensors depend on the sequence alone, not on its neighbours."""
    chosen = [samples()[i] for i in numbers]
    made = make_batch(chosen)

    def noise(salt: int) -> Tensor:
        parts = [torch.randn(s.num_tokens, generator=_generator(salt, s.sequence_id)) for s in chosen]
        return torch.cat(parts) if parts else torch.zeros(1)

    masked = made.mask.float()
    return made.with_(
        old_logprobs=(-4.2 + 0.1 * noise(1)) * masked,
        advantages=noise(2) * masked,
        returns=noise(3) * masked,
        values=0.1 * noise(4) * masked,
    )


def _generator(salt: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(salt * 1000 + int(name))


NUM_TOKENS = sum(sum(s.mask) for s in samples())


def actor_loss(outputs: Outputs, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return ppo_loss(
        outputs.logprob,
        batch.old_logprobs,
        batch.advantages,
        batch.mask,
        entropy=outputs.entropy,
        entropy_coef=0.01,
        num_tokens_global=NUM_TOKENS,
    )


def critic_loss(outputs: Outputs, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return ppo_loss(
        None,
        mask=batch.mask,
        values=outputs.values,
        old_values=batch.values,
        returns=batch.returns,
        num_tokens_global=NUM_TOKENS,
    )


def step(policy: Policy, batches: list[PackedBatch], lr: float = 0.3) -> dict[str, float]:
    """One PPO step. Actors train at temperature 0.8 with an entropy bonus."""
    if policy.value_head:
        return policy.train_step(batches, critic_loss, lr)
    return policy.train_step(batches, actor_loss, lr, temperature=0.8, entropy=True)


def tensors(policy: Policy) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in policy.hf_tensors()}


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for name, p in policy.model.named_parameters()}


def biggest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def head(seed: int = 5) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "value_head.weight": 0.3 * torch.randn(1, SHAPE["hidden_size"], generator=g),
        "value_head.bias": torch.tensor([0.2]),
    }
