"""The Megatron-core GPT model of one rank: layer spec, packed attention, norms and heads.

One code path for CPU and GPU. With transformer-engine the layers are its fused ones; without, they are megatron-core's
local layers with the three operations below in place of the slow ones: packed causal attention, RMSNorm and SwiGLU,
each with a hand-written backward that reads its inputs once.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from .cpu_adaptation import cuda_lookalike
from .parallel import World
from .weights import ModelConfig

HAVE_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None


class _RMSNorm(torch.autograd.Function):
    """y = w * x / sqrt(mean(x^2) + eps) over the last dimension, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = wide * scale
        ctx.save_for_backward(normed, scale, weight)
        return (normed * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        width, dtype = normed.shape[-1], grad.dtype
        grad = grad.float()
        product = (grad * normed).reshape(-1, width)
        grad_weight = product.sum(0)
        mean = (product @ weight.float() / -width).view(scale.shape)
        grad_x = torch.addcmul(grad * weight, normed, mean).mul_(scale)
        return grad_x.to(dtype), grad_weight.to(weight.dtype), None


class RMSNorm(torch.nn.Module):
    """Stands in for megatron-core's norm classes (same constructor)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class _SwiGLU(torch.autograd.Function):
    """y = silu(a) * b for x = [a, b] along the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


class SwiGLUMLP(MLP):
    """Megatron's MLP with the gated activation done in one pass."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> Any:
        inner, _bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(_SwiGLU.apply(inner))


@dataclass
class PackedLayout(PackedSeqParams):
    """Where the sequences of a packed batch lie, prepared once for all layers.

    ``buckets`` groups sequences of similar length. Each is (tokens int64[S, L], rows int64[n], members int64[n]):
    ``tokens`` gathers a right-padded [S, L] batch out of the stream (padding repeats the last token), and the
    bucket's real tokens ``members`` lie at ``rows`` of the flattened batch. Under a causal mask no real query sees
    padding, so the result is exact.
    """

    buckets: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    cos_sin: tuple[Tensor, Tensor] | None = None  # [T, 1, head_dim / 2]


def packed_layout(cu_seqlens: Tensor, head_dim: int, rope_theta: float, device: torch.device) -> PackedLayout:
    """The layout of sequences bounded by ``cu_seqlens`` int[S+1]."""
    bounds = cu_seqlens.to(torch.int64)
    starts, lengths = bounds[:-1], bounds.diff()
    positions = torch.arange(int(bounds[-1])) - torch.repeat_interleave(starts, lengths)
    frequencies = rope_theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(positions.float(), frequencies)[:, None]
    longest = int(lengths.max())
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens.to(device=device, dtype=torch.int32),
        cu_seqlens_kv=cu_seqlens.to(device=device, dtype=torch.int32),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        buckets=[tuple(t.to(device) for t in b) for b in _buckets(starts, lengths)],  # type: ignore[misc]
        cos_sin=(angles.cos().to(device), angles.sin().to(device)),
    )


def _buckets(starts: Tensor, lengths: Tensor, shrink: float = 0.75) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A new bucket begins where the length falls below ``shrink`` times the longest of the current one."""
    order = torch.argsort(lengths, descending=True, stable=True).tolist()
    groups: list[list[int]] = []
    for sequence in order:
        if not groups or lengths[sequence] < shrink * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(sequence)
    return [_bucket(starts[group], lengths[group]) for group in groups]


def _bucket(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    columns = torch.arange(int(lengths.max()))
    tokens = starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)
    rows = (columns < lengths[:, None]).flatten().nonzero().squeeze(1)
    return tokens, rows, tokens.flatten()[rows]


class _Pad(torch.autograd.Function):
    """[T, ...] -> [S, L, ...] of one bucket. Padding gets no gradient: nothing real depends on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor, members: Tensor) -> Tensor:
        ctx.save_for_backward(rows, members)
        ctx.num_tokens = x.shape[0]
        return x.index_select(0, tokens.flatten()).view(*tokens.shape, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, members = ctx.saved_tensors
        real = grad.flatten(0, 1).index_select(0, rows)
        covers_all = ctx.num_tokens == len(members)
        out = torch.empty_like(real) if covers_all else real.new_zeros(ctx.num_tokens, *real.shape[1:])
        return out.index_copy_(0, members, real), None, None, None


class _Unpad(torch.autograd.Function):
    """[S, L, W] of every bucket -> [T, W]."""

    @staticmethod
    def forward(ctx: Any, layout: PackedLayout, num_tokens: int, *padded: Tensor) -> Tensor:
        ctx.layout, ctx.shapes = layout, [p.shape for p in padded]
        out = padded[0].new_empty(num_tokens, padded[0].shape[-1])
        for batch, (_, rows, members) in zip(padded, layout.buckets, strict=True):
            out.index_copy_(0, members, batch.flatten(0, 1).index_select(0, rows))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = []
        for shape, (_, rows, members) in zip(ctx.shapes, ctx.layout.buckets, strict=True):
            out = grad.new_zeros(shape)
            out.flatten(0, 1).index_copy_(0, rows, grad.index_select(0, members))
            grads.append(out)
        return None, None, *grads


class _Rotate(torch.autograd.Function):
    """Rotary positions on [T, heads, head_dim]: the halves (a, b) become (a cos - b sin, b cos + a sin)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)
    return out


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed stream, rotary positions included. Query [T, heads, dim]."""

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        layout = packed_seq_params
        assert isinstance(layout, PackedLayout) and layout.cos_sin is not None
        query, key = (_Rotate.apply(x, *layout.cos_sin) for x in (query, key))
        return _Unpad.apply(layout, query.shape[0], *(self._bucket(b, query, key, value) for b in layout.buckets))

    def _bucket(self, bucket: tuple[Tensor, Tensor, Tensor], *qkv: Tensor) -> Tensor:
        q, k, v = (_Pad.apply(x, *bucket).transpose(1, 2) for x in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.scale)
        return out.transpose(1, 2).flatten(2)


class ValueHead(torch.nn.Linear):
    """[.., H] -> [.., 1] with a bias, zero at first. Takes the place of the output layer of a critic."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=True)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)


class HiddenStates(GPTModel):
    """A GPT model whose last stage returns hidden states [T, 1, H]: logits are never formed here."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        return hidden_states


def build_model(
    config: ModelConfig, world: World, *, bf16: bool = False, value_head: bool = False, overrides: Mapping | None = None
) -> HiddenStates:
    """This rank's part of the model, weights not set. ``overrides`` go to megatron's TransformerConfig."""
    config.check_parallel(world.tp, world.pp)
    fused = HAVE_TRANSFORMER_ENGINE and world.device.type == "cuda"
    transformer = _transformer_config(config, world, bf16, fused, overrides or {})
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)  # "Unknown MLP type"
    with cuda_lookalike(world.device):
        model = HiddenStates(
            transformer,
            _spec(transformer, fused),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            pre_process=world.is_first_stage,
            post_process=world.is_last_stage,
            share_embeddings_and_output_weights=config.tie_word_embeddings and not value_head,
            position_embedding_type="rope" if fused else "none",
            rotary_base=int(config.rope_theta),
        )
    if value_head and world.is_last_stage:
        model.output_layer = ValueHead(config.hidden_size)
    return model.to(device=world.device, dtype=torch.bfloat16 if bf16 else torch.float32)


def _spec(transformer: TransformerConfig, fused: bool) -> Any:
    if fused:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = PackedAttention
    parts.mlp.module, parts.mlp.params = SwiGLUMLP, {"tp_group": mpu.get_tensor_model_parallel_group()}
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(transformer), layer_norm=RMSNorm)


def _transformer_config(
    config: ModelConfig, world: World, bf16: bool, fused: bool, overrides: Mapping
) -> TransformerConfig:
    dtype = torch.bfloat16 if bf16 else torch.float32
    settings: dict[str, Any] = dict(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=world.tp,
        pipeline_model_parallel_size=world.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        use_cpu_initialization=world.device.type == "cpu",
        perform_initialization=False,  # weights always come from named tensors
        calculate_per_token_loss=True,  # the loss is already normalised: gradients are summed over micro-batches and dp
        variable_seq_lengths=True,  # micro-batches differ in length; the next line is what megatron then wants
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=False,
        batch_p2p_sync=False,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=fused,
    )
    unknown = sorted(set(overrides) - set(TransformerConfig.__dataclass_fields__))
    if unknown:
        raise ValueError(f"[megatron] has unknown keys: {', '.join(unknown)}")
    # Megatron-core warns about its own defaults and about the layer parts above, which are meant.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        return TransformerConfig(**settings | dict(overrides))


def head_weight(model: HiddenStates) -> Tensor:
    """This rank's vocabulary shard [V, H] of the output matrix, on the last stage."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def vocab_start(model: HiddenStates) -> int:
    return mpu.get_tensor_model_parallel_rank() * head_weight(model).shape[0]
