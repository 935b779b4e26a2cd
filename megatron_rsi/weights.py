"""Hugging Face <-> Megatron names and layouts of the Qwen3 family.

Each :class:`Rule` ties one Megatron parameter to the Hugging Face tensors it is made of and says how it is cut over
tensor-parallel ranks::

    Megatron parameter                        Hugging Face tensors            cut
    embedding.word_embeddings.weight          model.embed_tokens.weight       rows (vocabulary)
    ...self_attention.linear_qkv.weight       q_proj, k_proj, v_proj          by key/value group: [q q k v][q q k v]...
    ...mlp.linear_fc1.weight                  gate_proj, up_proj              rows of each, [gate shard; up shard]
    ...linear_proj.weight, linear_fc2.weight  o_proj, down_proj               columns
    norms, value head                         same                            not cut

The transformer-engine layers fuse the input norms into the following linear layer and name them after it; the tables
know both. A value head is stored as ``value_head.weight`` [1, H] and ``value_head.bias`` [1].
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ARCHITECTURE, MODEL_TYPE = "Qwen3ForCausalLM", "qwen3"


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a dense Qwen3 model, named as in its ``config.json``. Raises ValueError for shapes that cannot be."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 1024
    dtype: str = "float32"  # of the stored weights

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From a parsed ``config.json``. Another model_type or an unsupported option raises ValueError naming it."""
        if config.get("model_type") != MODEL_TYPE:
            raise ValueError(f"model_type {config.get('model_type')!r} is not supported, only {MODEL_TYPE!r}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"rotary scaling {rope} is not supported, only the default")
        for name, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
            if config.get(name, wanted) != wanted:
                raise ValueError(f"{name} = {config[name]!r} is not supported, only {wanted!r}")
        known = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
        if "head_dim" not in known and {"hidden_size", "num_attention_heads"} <= known.keys():
            known["head_dim"] = known["hidden_size"] // known["num_attention_heads"]
        known["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or 1e6)
        known["dtype"] = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        missing = [n for n, f in cls.__dataclass_fields__.items() if n not in known and f.default is _REQUIRED]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        return cls(**known)

    def to_hf(self) -> dict[str, Any]:
        """A ``config.json`` that transformers, SGLang and :meth:`from_hf` read."""
        names = [n for n in self.__dataclass_fields__ if n != "rope_theta"]
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            **{name: getattr(self, name) for name in names},
            "torch_dtype": self.dtype,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
        }

    def check_parallel(self, tp: int, pp: int) -> None:
        """Raises ValueError when the model cannot be cut into ``tp`` shards and ``pp`` equal stages."""
        for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
            if getattr(self, name) % tp:
                raise ValueError(f"model.{name} = {getattr(self, name)} is not divisible by tensor parallel size {tp}")
        if self.num_hidden_layers % pp:
            raise ValueError(f"{self.num_hidden_layers} layers cannot be cut into {pp} equal pipeline stages")

    def stage_of_layer(self, layer: int, pp: int) -> int:
        return layer // (self.num_hidden_layers // pp)


_REQUIRED = ModelConfig.__dataclass_fields__["hidden_size"].default


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter. ``layer`` is None outside the layers, else the name is relative to that layer.

    ``cut``: ``copy``, ``rows``, ``columns``, ``qkv`` or ``gate_up``; ``shapes`` are the full Hugging Face shapes.
    """

    names: tuple[str, ...]
    megatron: tuple[str, ...]  # the local spec's name, then transformer-engine's where it differs
    cut: str
    shapes: tuple[tuple[int, ...], ...]
    layer: int | None = None
    last_stage: bool = False


def rules(config: ModelConfig, value_head: bool = False) -> list[Rule]:
    """All rules of a model, in the fixed order in which tensors are exchanged and exported."""
    hidden, vocab = config.hidden_size, config.vocab_size
    table = [Rule(("model.embed_tokens.weight",), ("embedding.word_embeddings.weight",), "rows", ((vocab, hidden),))]
    for layer in range(config.num_hidden_layers):
        table += _layer_rules(config, layer)
    table.append(
        Rule(("model.norm.weight",), ("decoder.final_layernorm.weight",), "copy", ((hidden,),), last_stage=True)
    )
    if value_head:
        table += [
            Rule((f"value_head.{part}",), (f"output_layer.{part}",), "copy", (shape,), last_stage=True)
            for part, shape in (("weight", (1, hidden)), ("bias", (1,)))
        ]
    elif not config.tie_word_embeddings:
        table.append(Rule(("lm_head.weight",), ("output_layer.weight",), "rows", ((vocab, hidden),), last_stage=True))
    return table


def check_tensors(table: Sequence[Rule], given: Mapping[str, Tensor]) -> None:
    """Raises ValueError naming tensors that are missing, unexpected, of a wrong shape or not finite."""
    expected = {n: s for rule in table for n, s in zip(rule.names, rule.shapes, strict=True)}
    missing, unexpected = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(f"weights do not fit the model: missing {some(missing)}, unexpected {some(unexpected)}")
    for name, shape in expected.items():
        if tuple(given[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(given[name].shape)}, the model needs {shape}")
        if not bool(torch.isfinite(given[name]).all()):
            raise ValueError(f"{name} holds values that are not finite")


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first few of a list, for a message."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + more


def _layer_rules(config: ModelConfig, layer: int) -> list[Rule]:
    hidden, head, inner = config.hidden_size, config.head_dim, config.intermediate_size
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    specs: list[tuple[tuple[str, ...], tuple[str, ...], str, tuple[tuple[int, ...], ...]]] = [
        (
            ("input_layernorm",),
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            "copy",
            ((hidden,),),
        ),
        (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("self_attention.linear_qkv.weight",),
            "qkv",
            ((queries, hidden), (keys, hidden), (keys, hidden)),
        ),
        (("self_attn.q_norm",), ("self_attention.q_layernorm.weight",), "copy", ((head,),)),
        (("self_attn.k_norm",), ("self_attention.k_layernorm.weight",), "copy", ((head,),)),
        (("self_attn.o_proj",), ("self_attention.linear_proj.weight",), "columns", ((hidden, queries),)),
        (
            ("post_attention_layernorm",),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            "copy",
            ((hidden,),),
        ),
        (("mlp.gate_proj", "mlp.up_proj"), ("mlp.linear_fc1.weight",), "gate_up", ((inner, hidden), (inner, hidden))),
        (("mlp.down_proj",), ("mlp.linear_fc2.weight",), "columns", ((hidden, inner),)),
    ]
    return [
        Rule(tuple(f"model.layers.{layer}.{n}.weight" for n in names), megatron, cut, shapes, layer)
        for names, megatron, cut, shapes in specs
    ]


def shard(rule: Rule, tensors: Sequence[Tensor], config: ModelConfig, tp_rank: int, tp: int) -> Tensor:
    """The Megatron parameter of one tensor-parallel rank, from full Hugging Face tensors."""
    if rule.cut == "copy":
        return tensors[0]
    if rule.cut == "columns":
        return tensors[0].chunk(tp, dim=1)[tp_rank]
    if rule.cut == "qkv":
        groups = config.num_key_value_heads
        parts = [t.view(groups, t.shape[0] // groups, t.shape[1]) for t in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1).chunk(tp, dim=0)[tp_rank]
    return torch.cat([t.chunk(tp, dim=0)[tp_rank] for t in tensors])


def unshard(rule: Rule, shards: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
    """Full Hugging Face tensors, from the shards of all tensor-parallel ranks. Inverse of :func:`shard`."""
    if rule.cut == "copy":
        return [shards[0]]
    if rule.cut == "columns":
        return [torch.cat(list(shards), dim=1)]
    if rule.cut == "qkv":
        groups, head = config.num_key_value_heads, config.head_dim
        whole = torch.cat(list(shards)).view(groups, -1, config.hidden_size)
        sizes = [config.num_attention_heads // groups * head, head, head]
        return [part.flatten(0, 1) for part in whole.split(sizes, dim=1)]
    halves = [s.chunk(len(rule.names), dim=0) for s in shards]
    return [torch.cat(list(parts)) for parts in zip(*halves, strict=True)]


def random_tensors(config: ModelConfig, seed: int = 0, std: float = 0.02) -> Iterator[tuple[str, Tensor]]:
    """Fresh float32 weights under Hugging Face names: N(0, std), output projections divided by sqrt(2 L), norms 1.

    Each tensor has its own seed, made from its name: the same weights for every parallel layout.
    """
    for rule in rules(config):
        for name, shape in zip(rule.names, rule.shapes, strict=True):
            if len(shape) == 1:
                yield name, torch.ones(shape)
                continue
            generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = (2 * config.num_hidden_layers) ** -0.5 if residual else 1.0
            yield name, torch.randn(shape, generator=generator) * (std * scale)
