"""Makes the tiny base model: a tokenizer and a Qwen3 checkpoint trained from nothing on the synthetic corpus.

Runs once a run folder; ``--base DIR`` skips it and takes any Hugging Face Qwen3 checkpoint instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from . import batch as packing
from .batch import PackedBatch
from .checkpoint import export_hf
from .corpus import batches, train_tokenizer
from .parallel import World
from .policy import ModelConfig, OptimizerConfig, Outputs, Policy
from .rollout.chat import TINY, Chat
from .settings import BaseTraining, Config


def model_config(config: Config) -> ModelConfig:
    m = config.model
    return ModelConfig(
        hidden_size=m.hidden_size, num_hidden_layers=m.num_layers, num_attention_heads=m.num_heads,
        num_key_value_heads=m.num_kv_heads, head_dim=m.head_dim, intermediate_size=m.intermediate_size,
        vocab_size=m.vocab_size, rope_theta=m.rope_theta, rms_norm_eps=m.rms_norm_eps,
        tie_word_embeddings=m.tie_embeddings, max_position_embeddings=m.context,
    )  # fmt: skip


def initial_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Normal(0, 0.02) matrices, output matrices of a block scaled by 1/sqrt(2 layers), norms at one."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in config.hf_shapes():
        if len(shape) == 1:
            yield name, torch.ones(shape)
            continue
        scale = 0.02 / math.sqrt(2 * config.num_hidden_layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        yield name, torch.randn(shape, generator=generator) * scale


def rate(step: int, settings: BaseTraining) -> float:
    """Linear warm-up, flat, linear decay over the last ``decay_share`` of the steps; in (0, 1]."""
    left = (settings.steps - step) / max(1.0, settings.steps * settings.decay_share)
    return min(1.0, (step + 1) / max(1, settings.warmup_steps), left)


def next_token_loss(num_tokens: int) -> Callable[[Outputs, PackedBatch], tuple[Tensor, dict[str, Tensor]]]:
    """Sum of -log p over masked tokens, divided by the global number of them."""

    def loss(outputs: Outputs, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.logprob is not None
        nll = -outputs.logprob.sum() / num_tokens
        return nll, {"nll": nll.detach()}

    return loss


def make_base(config: Config, world: World, folder: Path, report: Callable[[int, int, float], None]) -> Path:
    """Trains and writes ``folder`` (config.json, model.safetensors, tokenizer.json); returns it. Kept when complete."""
    if (folder / "DONE").exists():
        return folder
    settings = config.base_training
    tokenizer = train_tokenizer(config.seed, settings, config.model.vocab_size)
    chat = Chat(tokenizer, TINY)
    shape = model_config(config)
    optimizer = OptimizerConfig(
        kind="muon", weight_decay=settings.weight_decay, muon_lr_ratio=settings.muon_lr / settings.adamw_lr
    )
    policy = Policy(shape, world, optimizer)
    policy.load_hf(initial_tensors(shape, config.seed))
    draw = batches(chat, settings, config.seed, settings.steps, settings.batch_tokens, config.model.context)
    for step in range(settings.steps):
        samples = [
            packing.Sample(f"base/{step}/{n}", s.ids, s.mask, [0] * len(s.ids), [0.0] * len(s.ids))
            for n, s in enumerate(draw(step))
        ]
        num_tokens = sum(sum(s.mask) for s in samples)
        own = packing.split_dp(samples, world.dp)[world.dp_rank]
        metrics = policy.train_step([packing.make_batch(own)], next_token_loss(num_tokens), settings.adamw_lr * rate(step, settings))
        if step % 50 == 0 or step == settings.steps - 1:
            report(step + 1, settings.steps, metrics["nll"])
    export_hf(policy, folder, {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": tokenizer_config(chat)})
    if world.is_main:
        (folder / "DONE").write_text("")
    world.barrier()
    return folder


def tokenizer_config(chat: Chat) -> str:
    return json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": chat.format.stop, "pad_token": "<|pad|>",
            "chat_template": chat.format.jinja(),
        },
        indent=1,
    )  # fmt: skip
