"""What a configuration needs in memory, before anything is started: weights, optimizer, KV cache, sandboxes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .config import Config


@dataclass(frozen=True)
class Shape:
    """The numbers of a Qwen3-style model that decide its size."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool

    def num_layer_parameters(self) -> int:
        """Attention (q, k, v, o), SwiGLU (gate, up, down), two norms and the q/k norms of one layer."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size + 2 * self.head_dim

    def num_parameters(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.num_layer_parameters() + self.hidden_size

    def num_critic_parameters(self) -> int:
        """The same trunk with its own embedding and a head of one output (weight and bias)."""
        embedding = self.vocab_size * self.hidden_size
        return embedding + self.num_layers * self.num_layer_parameters() + 2 * self.hidden_size + 1

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def shape_of(config: Config) -> Shape:
    """From ``[model]``, or from the checkpoint's config.json when ``base`` is set; ValueError when it is no Qwen3."""
    if config.base is None:
        m = config.model
        return Shape(
            m.hidden_size, m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim, m.intermediate_size, m.vocab_size,
            m.tie_embeddings,
        )  # fmt: skip
    path = Path(config.base) / "config.json"
    if not path.is_file():
        raise ValueError(f"base checkpoint {config.base} has no config.json: give a folder in Hugging Face format")
    try:
        values = json.loads(path.read_text())
        heads = values["num_attention_heads"]
        return Shape(
            values["hidden_size"], values["num_hidden_layers"], heads, values["num_key_value_heads"],
            values.get("head_dim", values["hidden_size"] // heads), values["intermediate_size"], values["vocab_size"],
            values.get("tie_word_embeddings", False),
        )  # fmt: skip
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{path} does not describe a Qwen3 model: {error}") from None


def plan(config: Config, bf16: bool) -> list[tuple[str, int, str]]:
    """Rows (what, bytes, how) for each process of the trainer, the largest stage first.

    fp32 training holds 16 bytes a parameter: weight 4, gradient 4, Adam moments 8. bf16 training holds 18: weight 2,
    fp32 gradient 4, fp32 master weight 4, Adam moments 8. Activations are not estimated.
    """
    shape, shards = shape_of(config), config.world.tp * config.world.pp
    held, value = (18, 2) if bf16 else (16, 4)
    actor, critic = shape.num_parameters(), shape.num_critic_parameters()
    kv_tokens = config.engine.max_batch * config.engine.context
    return [
        ("actor", held * actor // shards, f"{actor:,} parameters x {held} bytes over {shards} processes"),
        ("critic", held * critic // shards, f"{critic:,} parameters x {held} bytes over {shards} processes"),
        ("engine weights", value * actor, f"{actor:,} parameters x {value} bytes"),
        (
            "engine KV cache",
            kv_tokens * shape.kv_bytes_per_token(value),
            f"{config.engine.max_batch} sequences x {config.engine.context} tokens, at most",
        ),
        (
            "sandboxes",
            config.sandbox.pool_size * config.sandbox.memory_mb * 2**20,
            f"{config.sandbox.pool_size} boxes x {config.sandbox.memory_mb} MiB, at most, in the host's memory",
        ),
    ]


def format_bytes(count: int) -> str:
    """
    >>> format_bytes(3 * 2**30), format_bytes(900)
    ('3.0 GiB', '900 B')
    """
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
