"""An actor or a critic on Megatron-core: load, score, train, export. One code path for CPU and GPU.

The last stage never forms logits: hidden states of the tokens that predict an action token, and only those, go with
this rank's shard of the output matrix into :func:`linear_logprob`. The loss arrives normalised by the *global* number
of action tokens, so gradients are summed over micro-batches and data-parallel ranks, never averaged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from . import weights as tables
from .batch import PackedBatch
from .cpu_adaptation import cuda_lookalike
from .kernels import linear_logprob
from .model import HiddenStates, PackedLayout, build_model, head_weight, packed_layout, vocab_start
from .muon import Muon
from .parallel import World
from .settings import Layout
from .weights import ModelConfig

__all__ = ["ModelConfig", "OptimizerConfig", "Outputs", "Policy"]


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights are updated. The learning rate itself comes with every step.

    ``muon`` uses :class:`Muon` for the matrices of the layers, at ``muon_lr_ratio`` times the learning rate, and
    AdamW for embedding, head and norms; only without tensor parallelism. ``bf16`` keeps float32 master weights.
    """

    kind: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # 0: no clipping
    bf16: bool = False
    distributed: bool = False  # shard optimizer states over data-parallel ranks
    muon_lr_ratio: float = 10.0
    muon_momentum: float = 0.95

    @classmethod
    def of(cls, layout: Layout, world: World, **values: Any) -> OptimizerConfig:
        """AdamW with the number format of ``world.dtype``, its states sharded where data-parallel GPUs can share them."""
        on_gpu = world.device.type == "cuda"
        bf16 = layout.dtype == "bfloat16" or (layout.dtype == "auto" and on_gpu)
        return cls(bf16=bf16, distributed=on_gpu and world.dp > 1, **values)

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "muon"):
            raise ValueError(f"unknown optimizer {self.kind!r}, expected 'adamw' or 'muon'")
        if self.kind == "muon" and (self.distributed or self.bf16):
            raise ValueError("muon works with float32 weights and without the distributed optimizer")
        if self.clip_grad < 0 or self.weight_decay < 0 or self.eps <= 0:
            raise ValueError(f"clip_grad and weight_decay must be >= 0 and eps > 0, got {self}")


@dataclass(frozen=True)
class Outputs:
    """What the loss gets for one micro-batch of T tokens, on the last stage. 0 where the batch's mask is 0.

    ``logprob`` float32[T] and, when asked for, ``entropy`` float32[T] of actors; ``values`` float32[T] of critics,
    read at the hidden state that predicts the token.
    """

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


Loss = Callable[[Outputs, PackedBatch], tuple[Tensor, dict[str, Tensor]]]


class Policy:
    """An actor, or with ``value_head`` a critic (always untied: its head has nothing to do with the embedding).

    Weights are unset until :meth:`load_hf` or :meth:`load_state_dict`. ``megatron`` holds further TransformerConfig
    settings. Every method is collective: all ranks call it, those of one model with the same data.
    """

    def __init__(
        self,
        config: ModelConfig,
        world: World,
        optimizer: OptimizerConfig | None = None,
        value_head: bool = False,
        megatron: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.world, self.value_head = config, world, value_head
        self.optimizer_config = optimizer or OptimizerConfig()
        if self.optimizer_config.kind == "muon" and world.tp > 1:
            raise ValueError(f"muon needs whole matrices: set world.tp=1 (it is {world.tp}) or optimizer adamw")
        self.num_steps = 0
        self.model: HiddenStates = build_model(
            config, world, bf16=self.optimizer_config.bf16, value_head=value_head, overrides=megatron
        )
        self._rules = tables.rules(config, value_head)
        self._parameters = dict(self.model.named_parameters())
        self._mark_shards()
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=self.optimizer_config.distributed,
        )
        self.ddp = DistributedDataParallel(self.model.config, settings, self.model)
        self.model.config.finalize_model_grads_func = _sum_gradients
        with cuda_lookalike(world.device):
            self.optimizer = _build_optimizer(self.optimizer_config, self.ddp, self.model)
        self._schedule = get_forward_backward_func()

    def _mark_shards(self) -> None:
        """Megatron marks tensor-parallel shards only while it initialises weights, which is skipped here. Without the
        mark a shard passes for a replica, and the gradient norm silently counts the first rank's shards alone."""
        for rule in self._rules:
            parameter = self._local(rule)
            if parameter is not None and rule.cut != "copy":
                _mark_shard(parameter, dim=1 if rule.cut == "columns" else 0)
        if self._has_tied_copy:
            _mark_shard(self.model.output_layer.weight, dim=0)

    @property
    def _has_tied_copy(self) -> bool:
        """With pipeline stages, the last one holds its own copy of a tied embedding."""
        tied = self.model.share_embeddings_and_output_weights
        return tied and self.world.pp > 1 and self.world.is_last_stage

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(torch.Size(shape).numel() for rule in self._rules for shape in rule.shapes)

    # ---- weights
    @torch.no_grad()
    def load_hf(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Take full tensors under Hugging Face names; every rank keeps its part. Optimizer states stay as they are.

        Raises ValueError naming tensors that are missing, unexpected or of a wrong shape. A tied model accepts (and
        ignores) ``lm_head.weight``; a critic accepts an actor's head and requires ``value_head.*``.
        """
        given = dict(tensors.items() if isinstance(tensors, Mapping) else tensors)
        if self.value_head or self.config.tie_word_embeddings:
            given.pop("lm_head.weight", None)
        tables.check_tensors(self._rules, given)
        for rule in self._rules:
            parameter = self._local(rule)
            if parameter is not None:
                full = [given[name].to(parameter.device) for name in rule.names]
                parameter.copy_(tables.shard(rule, full, self.config, self.world.tp_rank, self.world.tp))
        if self._has_tied_copy:
            shards = given["model.embed_tokens.weight"].chunk(self.world.tp)
            self.model.output_layer.weight.copy_(shards[self.world.tp_rank])
        self.optimizer.reload_model_params()

    def _local(self, rule: tables.Rule) -> Tensor | None:
        """This rank's parameter of a rule, None when another stage holds it."""
        if self._owner(rule) != self.world.pp_rank:
            return None
        for name in rule.megatron:
            full = name if rule.layer is None else f"decoder.layers.{self._local_layer(rule.layer)}.{name}"
            if full in self._parameters:
                return self._parameters[full]
        raise AssertionError(f"no parameter for {rule.names}")

    def _owner(self, rule: tables.Rule) -> int:
        if rule.layer is not None:
            return self.config.stage_of_layer(rule.layer, self.world.pp)
        return self.world.pp - 1 if rule.last_stage else 0

    def _local_layer(self, layer: int) -> int:
        return layer % (self.config.num_hidden_layers // self.world.pp)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names, one at a time and in a fixed order, on every rank.

        Collective: every rank must exhaust it. At most one Megatron parameter is gathered at any time.
        """
        for rule in self._rules:
            local = self._local(rule)
            if local is not None:
                full = tables.unshard(rule, self._gather_tp(rule, local.detach()), self.config)
            else:
                full = [self._empty(shape) for shape in rule.shapes]
            for name, tensor in zip(rule.names, full, strict=True):
                yield name, self._from_stage(self._owner(rule), tensor)

    def _empty(self, *shape: Any) -> Tensor:
        return torch.empty(*shape, dtype=self.model.config.params_dtype, device=self.world.device)

    def _gather_tp(self, rule: tables.Rule, local: Tensor) -> list[Tensor]:
        if self.world.tp == 1 or rule.cut == "copy":
            return [local]
        shards = [torch.empty_like(local) for _ in range(self.world.tp)]
        dist.all_gather(shards, local.contiguous(), group=self.world.group("tp"))
        return shards

    def _from_stage(self, pp_rank: int, tensor: Tensor) -> Tensor:
        if self.world.pp > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, src=self.world.stage_rank(pp_rank), group=self.world.group("pp"))
        return tensor

    def weights_hash(self) -> str:
        """sha256 over names and bytes of all full tensors: equal for every parallel layout, equal iff nothing moved."""
        digest = hashlib.sha256()
        for name, tensor in self.hf_tensors():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    # ---- scoring
    def logprobs(
        self, batches: Sequence[PackedBatch], temperature: float = 1.0, entropy: bool = False
    ) -> list[Tensor] | list[tuple[Tensor, Tensor]]:
        """Log-probs float32[T] of sampled tokens at ``temperature``, 0 elsewhere, on the CPU of each rank of the model.

        With ``entropy`` pairs (log-probs, entropies). No gradient. Data-parallel ranks may pass different batches.
        """
        if self.value_head:
            raise ValueError("a critic has no log-probs")
        rows = self._score(batches, temperature, entropy)
        return [(a, b) for a, b in rows] if entropy else [a for a, *_ in rows]

    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Values float32[T] at sampled tokens, read at the hidden state that predicts the token; 0 elsewhere."""
        if not self.value_head:
            raise ValueError("an actor has no value head")
        return [values for (values,) in self._score(batches, 1.0, False)]

    @torch.no_grad()
    def _score(self, batches: Sequence[PackedBatch], temperature: float, entropy: bool) -> list[list[Tensor]]:
        if not batches:
            return []

        def read(hidden: Tensor, batch: PackedBatch) -> list[Tensor]:
            out = self._outputs(hidden, batch, temperature, entropy)
            return [p for p in (out.values, out.logprob, out.entropy) if p is not None]

        results = self._run(batches, lambda batch: lambda hidden, **_: read(hidden, batch), forward_only=True)
        num_parts = 2 if entropy else 1
        return [self._share(results[i] if results else None, b, num_parts) for i, b in enumerate(batches)]

    def _share(self, parts: list[Tensor] | None, batch: PackedBatch, num_parts: int) -> list[Tensor]:
        """From the last stage to all stages, to the CPU."""
        if parts is None:
            parts = [torch.empty(batch.num_tokens, device=self.world.device) for _ in range(num_parts)]
        return [self._from_stage(self.world.pp - 1, p).cpu() for p in parts]

    def _outputs(self, hidden: Tensor, batch: PackedBatch, temperature: float, entropy: bool) -> Outputs:
        states = hidden.view(batch.num_tokens, -1)
        index = batch.action_index.to(states.device)

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(batch.num_tokens).index_copy(0, index, values)

        predictors = states.index_select(0, index - 1)
        if self.value_head:
            return Outputs(values=spread(self.model.output_layer(predictors).float().squeeze(1)))
        logprob, entropies = linear_logprob(
            predictors,
            head_weight(self.model),
            batch.tokens.to(states.device).index_select(0, index),
            temperature=temperature,
            entropy=entropy,
            vocab_start=vocab_start(self.model),
            group=self.world.group("tp") if self.world.tp > 1 else None,
        )
        return Outputs(logprob=spread(logprob), entropy=None if entropies is None else spread(entropies))

    # ---- training
    def train_step(
        self,
        microbatches: Sequence[PackedBatch],
        loss: Loss,
        lr: float,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> dict[str, float]:
        """One optimizer step over this data-parallel rank's micro-batches (ranks may hold different numbers of them).

        ``loss(outputs, batch)`` returns the micro-batch's scalar share of the loss, already divided by the global
        number of action tokens, and detached metric sums. Returns the metrics, ``loss`` and ``grad_norm`` (before
        clipping) of the global batch on every rank: names ending in ``_max`` and ``_min`` are reduced that way, all
        others summed. A gradient that is not finite changes nothing and is reported as ``skipped_updates`` = 1.
        """
        batches = self._even(microbatches)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

        def share(batch: PackedBatch) -> Callable:
            def run(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                value, metrics = loss(self._outputs(hidden, batch, temperature, entropy), batch)
                value = value + hidden[:0].sum()  # an empty batch's loss still reaches the model, with gradient 0
                none = torch.zeros((), dtype=torch.int, device=hidden.device)
                return value, none, {"loss": value.detach().clone(), **metrics}

            return run

        results = self._run(batches, share, forward_only=False)
        grad_norm, applied = self._update(lr)
        metrics = self._reduce(results)
        return metrics | {"grad_norm": grad_norm, "skipped_updates": float(not applied), "lr": lr}

    def _even(self, microbatches: Sequence[PackedBatch]) -> list[PackedBatch]:
        count = self.world.all_reduce({"n": len(microbatches)}, "max", group="dp")["n"] if self.world.dp > 1 else 0
        count = max(int(count), len(microbatches))
        if count == 0:
            raise ValueError("train_step got no micro-batches on any rank")
        return list(microbatches) + [PackedBatch.empty()] * (count - len(microbatches))

    def _run(self, batches: Sequence[PackedBatch], share: Callable, forward_only: bool) -> list:
        """Megatron's schedule over the batches. Results of the last stage, an empty list on the others."""

        def step(data: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            batch = next(data)
            return self._forward(model, batch), share(batch)

        return self._schedule(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[self.ddp],
            num_microbatches=len(batches),
            seq_length=self.config.max_position_embeddings,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward(self, model: torch.nn.Module, batch: PackedBatch) -> Tensor:
        device = self.world.device
        tokens = batch.tokens.to(device)[None]
        return model(tokens, batch.positions.to(device)[None], None, packed_seq_params=self._layout(batch))

    def _layout(self, batch: PackedBatch) -> PackedLayout:
        key = ("layout", self.config.head_dim, self.config.rope_theta)
        if key not in batch._cache:
            batch._cache[key] = packed_layout(
                batch.cu_seqlens, self.config.head_dim, self.config.rope_theta, self.world.device
            )
        return batch._cache[key]

    @torch.no_grad()
    def _update(self, lr: float) -> tuple[float, bool]:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not torch.isfinite(torch.tensor(norm)):
            return norm, False
        limit = self.optimizer_config.clip_grad
        if limit and norm > limit:  # scale the gradient buffers themselves: one product for all parameters
            self.ddp.scale_gradients(limit / (norm + 1e-6))
            self.optimizer.prepare_grads()
        self.optimizer.step_with_ready_grads()
        self.num_steps += 1
        return norm, True

    def _reduce(self, results: list[dict[str, Tensor]]) -> dict[str, float]:
        """Metrics over micro-batches, data-parallel ranks, and from the last stage to all."""
        local: dict[str, float] = {}
        for metrics in results:
            for name, value in metrics.items():
                local[name] = _REDUCERS[_reducer(name)](local[name], float(value)) if name in local else float(value)
        if self.world.dp > 1 and self.world.is_last_stage:
            parts = {op: {n: v for n, v in local.items() if _reducer(n) == op} for op in _REDUCERS}
            local = {n: v for op, p in parts.items() if p for n, v in self.world.all_reduce(p, op, "dp").items()}
        if self.world.pp > 1:
            box = [local]
            dist.broadcast_object_list(box, src=self.world.stage_rank(self.world.pp - 1), group=self.world.group("pp"))
            local = box[0]
        return local

    # ---- resume
    def state_dict(self) -> dict[str, Any]:
        """This rank's weights, optimizer states, float32 masters and step count, copied to the CPU.

        Loads at the same layout only.
        """
        return {
            "model": _copy_to_cpu(self._parameters),
            "optimizer": _copy_to_cpu([o.state_dict() for o in self._torch_optimizers()]),
            "masters": _copy_to_cpu([[p for g in o.param_groups for p in g["params"]] for o in self._masters()]),
            "num_steps": self.num_steps,
            "layout": self.layout,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`. Raises ValueError for another layout, optimizer or set of parameters."""
        if state["layout"] != self.layout:
            raise ValueError(f"state was saved with {state['layout']}, this policy has {self.layout}")
        if state["model"].keys() != self._parameters.keys():
            odd = sorted(state["model"].keys() ^ self._parameters.keys())
            raise ValueError(f"state and model differ in parameters: {tables.some(odd)}")
        for name, parameter in self._parameters.items():
            parameter.copy_(state["model"][name])
        for optimizer, saved in zip(self._torch_optimizers(), state["optimizer"], strict=True):
            optimizer.load_state_dict(saved)
        for optimizer, masters in zip(self._masters(), state["masters"], strict=True):
            for parameter, saved in zip((p for g in optimizer.param_groups for p in g["params"]), masters, strict=True):
                parameter.copy_(saved)
        self.num_steps = state["num_steps"]

    @property
    def layout(self) -> dict[str, Any]:
        """What a per-rank state depends on."""
        world, optimizer = self.world, self.optimizer_config
        return {
            "tp": world.tp,
            "pp": world.pp,
            "dp": world.dp if optimizer.distributed else 0,
            "rank": (world.tp_rank, world.pp_rank, world.dp_rank if optimizer.distributed else 0),
            "optimizer": optimizer.kind,
            "bf16": optimizer.bf16,
            "value_head": self.value_head,
        }

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        return [o.optimizer for o in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]

    def _masters(self) -> list[torch.optim.Optimizer]:
        """Optimizers whose parameters are float32 copies of the model's, to be saved on their own."""
        return self._torch_optimizers() if self.optimizer_config.bf16 or self.optimizer_config.distributed else []


_REDUCERS: dict[str, Callable[[float, float], float]] = {"sum": lambda a, b: a + b, "max": max, "min": min}


def _copy_to_cpu(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: _copy_to_cpu(value) for key, value in tree.items()}
    return [_copy_to_cpu(value) for value in tree] if isinstance(tree, list) else tree


def _mark_shard(parameter: Tensor, dim: int) -> None:
    for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
        setattr(parameter, name, value)


def _reducer(name: str) -> str:
    return {"_max": "max", "_min": "min"}.get(name[-4:], "sum")


def _sum_gradients(model: list, num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction over dp, tied embeddings and q/k norms, without its division by the token count."""
    finalize_model_grads(model, None, **kwargs)


def _build_optimizer(config: OptimizerConfig, ddp: DistributedDataParallel, model: HiddenStates) -> MegatronOptimizer:
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=config.distributed,
        log_num_zeros_in_grad=False,
    )
    if config.kind == "muon":
        return _build_muon(config, settings, model)
    optimizer = get_megatron_optimizer(settings, [ddp], use_gloo_process_groups=False)
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
    return optimizer


def _build_muon(config: OptimizerConfig, settings: MegatronOptimizerConfig, model: HiddenStates) -> MegatronOptimizer:
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.dim() == 2 and ".layers." in n]
    others = [p for n, p in named if not (p.dim() == 2 and ".layers." in n)]
    muon = Muon(matrices, lr=0.0, weight_decay=config.weight_decay, momentum=config.muon_momentum)
    adamw = torch.optim.AdamW(others, lr=0.0, betas=config.betas, eps=config.eps, weight_decay=0.0, fused=True)
    muon.param_groups[0]["lr_mult"] = config.muon_lr_ratio
    return ChainedOptimizer([FP32Optimizer(o, settings, lambda *_: None) for o in (muon, adamw)])
