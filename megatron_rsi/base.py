"""Makes the tiny base model: a tokenizer and a Qwen3 checkpoint trained from nothing on the synthetic corpus.

Runs once a run folder; ``--base DIR`` skips it and takes any Hugging Face Qwen3 checkpoint instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from . import batch as packing
from . import supervised
from .checkpoint import export_hf
from .corpus import batches, train_tokenizer
from .parallel import World
from .policy import ModelConfig, OptimizerConfig, Policy
from .rollout.chat import TINY, Chat
from .settings import BaseTraining, Config
from .weights import random_tensors


def model_config(config: Config) -> ModelConfig:
    m = config.model
    return ModelConfig(
        hidden_size=m.hidden_size, num_hidden_layers=m.num_layers, num_attention_heads=m.num_heads,
        num_key_value_heads=m.num_kv_heads, head_dim=m.head_dim, intermediate_size=m.intermediate_size,
        vocab_size=m.vocab_size, rope_theta=m.rope_theta, rms_norm_eps=m.rms_norm_eps,
        tie_word_embeddings=m.tie_embeddings, max_position_embeddings=m.context,
    )  # fmt: skip


def rate(step: int, settings: BaseTraining) -> float:
    """Linear warm-up, flat, linear decay over the last ``decay_share`` of the steps; in (0, 1]."""
    left = (settings.steps - step) / max(1.0, settings.steps * settings.decay_share)
    return min(1.0, (step + 1) / max(1, settings.warmup_steps), left)


def make_base(config: Config, world: World, folder: Path, report: Callable[[int, int, float], None]) -> Path:
    """Trains and writes ``folder`` (config.json, model.safetensors, tokenizer.json); returns it. Kept when it exists.

    ``report`` is called after every step with its number, the number of steps and the loss.
    """
    if folder.exists():
        return folder
    settings = config.base_training
    tokenizer = train_tokenizer(config.seed, settings, config.model.vocab_size)
    chat = Chat(tokenizer, TINY)
    shape = model_config(config)
    ratio = settings.muon_lr / settings.adamw_lr
    optimizer = OptimizerConfig(kind="muon", weight_decay=settings.weight_decay, muon_lr_ratio=ratio)
    policy = Policy(shape, world, optimizer, megatron=config.megatron)
    policy.load_hf(random_tensors(shape, config.seed))
    draw = batches(chat, settings, config.seed, settings.steps, settings.batch_tokens, config.model.context)

    def sequences(step: int) -> list[packing.Sample]:
        return [packing.Sample.plain(f"base/{step}/{n}", s.ids, s.mask) for n, s in enumerate(draw(step))]

    checkpoints = folder.with_name(f"{folder.name}_checkpoints")
    supervised.fit(
        policy, sequences, settings.steps, lambda step: settings.adamw_lr * rate(step, settings), checkpoints,
        max(1, settings.steps // 5), lambda step, metrics: report(step, settings.steps, metrics["nll"]),
    )  # fmt: skip
    export_hf(policy, folder, write_tokenizer(chat, folder.with_name(f"{folder.name}_tokenizer"), world))
    supervised.clear(policy, checkpoints)
    return folder


def write_tokenizer(chat: Chat, folder: Path, world: World) -> list[Path]:
    files = {"tokenizer.json": chat.tokenizer.to_str(), "tokenizer_config.json": tokenizer_config(chat)}
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    world.barrier()
    return [folder / name for name in files]


def tokenizer_config(chat: Chat) -> str:
    return json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": chat.format.stop, "pad_token": "<|pad|>",
            "chat_template": chat.format.jinja(),
        },
        indent=1,
    )  # fmt: skip
