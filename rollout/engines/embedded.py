"""The embedded torch engine: a batched KV-cache loop over a functional Qwen3 forward. The CPU default.

Concurrent ``generate`` calls share one batch. Sequences join and leave at any step, and the KV cache of a trial stays in
its slot between turns, so each turn feeds only the new observation. It takes the same Hugging Face named tensors that
feed SGLang.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ..records import Completion
from .base import EngineError, Sampling


@dataclass(frozen=True)
class Qwen3Shape:
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    eps: float

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Qwen3Shape:
        if config.get("model_type") != "qwen3":
            raise ValueError(f"the embedded engine runs model_type 'qwen3', not {config.get('model_type')!r}")
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        return cls(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["vocab_size"],
            float(theta),
            config["rms_norm_eps"],
        )


@dataclass(frozen=True)
class Layer:
    """Weights of one block; q, k, v and gate, up are fused into one product each."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm1: torch.Tensor
    norm2: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor


@dataclass
class Request:
    ids: list[int]
    sampling: Sampling
    session: str
    future: asyncio.Future[Completion]
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rng: random.Random = field(default_factory=random.Random)


@dataclass
class Slot:
    """One row of the KV cache: the ids it holds, who owns it, and the request being served."""

    index: int
    ids: list[int] = field(default_factory=list)
    session: str = ""
    request: Request | None = None
    last_used: int = 0

    @property
    def pending(self) -> list[int]:
        assert self.request is not None
        return (self.request.ids + self.request.new_ids)[len(self.ids) :]


class EmbeddedEngine:
    """See ``PolicyEngine``. ``max_batch`` rows of ``context`` tokens of KV cache, in fp32."""

    def __init__(self, config: dict[str, Any], *, max_batch: int, context: int, device: torch.device | str = "cpu"):
        self.shape = Qwen3Shape.from_hf(config)
        self.context, self.max_batch, self.weight_version = context, max_batch, -1
        self.device = torch.device(device)
        self.busy_s, self.num_generated = 0.0, 0
        self._layers: list[Layer] = []
        self._waiting: list[Request] = []
        self._slots = [Slot(i) for i in range(max_batch)]
        self._cache: torch.Tensor | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._clock = 0
        positions = torch.arange(context)[:, None].float()
        frequencies = self.shape.rope_theta ** (-torch.arange(0, self.shape.head_dim, 2).float() / self.shape.head_dim)
        angles = torch.cat([positions * frequencies] * 2, -1)
        self._cos, self._sin = angles.cos().to(self.device), angles.sin().to(self.device)

    # ---- the seam

    async def generate(self, ids: list[int], sampling: Sampling, session: str) -> Completion:
        if self.weight_version < 0:
            raise EngineError("the engine has no weights yet: call load_weights first")
        if not 0 < len(ids) < self.context:
            raise ValueError(f"prompt of {len(ids)} tokens does not fit a context of {self.context}")
        request = Request(ids, sampling, session, asyncio.get_running_loop().create_future())
        request.rng.seed(f"{sampling.seed}:{len(ids)}")
        self._waiting.append(request)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._serve())
        try:
            return await request.future
        except asyncio.CancelledError:
            self._forget(request)
            raise

    def _forget(self, request: Request) -> None:
        """Nobody waits for this request any more: a row that still served it would keep weights from being replaced."""
        if request in self._waiting:
            self._waiting.remove(request)
        for slot in self._slots:
            if slot.request is request:
                slot.request = None

    def release(self, session: str) -> None:
        for slot in self._slots:
            if slot.session == session and slot.request is None:
                slot.session, slot.ids = "", []

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if self._waiting or any(s.request for s in self._slots):
            raise EngineError("weights cannot be replaced while requests run: drain the engine first")
        weights = {name: tensor.detach().to(self.device, torch.float32) for name, tensor in tensors}
        try:
            layers = [_layer(weights, n) for n in range(self.shape.num_layers)]
            embedding, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        except KeyError as missing:
            raise ValueError(f"the weight stream lacks {missing}") from missing
        self._layers, self._embedding, self._norm = layers, embedding.clone(), norm.clone()
        self._head = weights["lm_head.weight"].clone() if "lm_head.weight" in weights else self._embedding
        self.weight_version = version
        for slot in self._slots:  # a prefix cached under the old weights must never be reused
            slot.session, slot.ids = "", []

    def sleep(self) -> None:
        if self._waiting or any(s.request for s in self._slots):
            raise EngineError("the engine cannot sleep while requests run: drain it first")
        self._cache = None
        for slot in self._slots:
            slot.session, slot.ids = "", []

    def wake(self) -> None:
        if self._cache is None:
            s = self.shape
            size = (s.num_layers, 2, self.max_batch, s.num_kv_heads, self.context, s.head_dim)
            self._cache = torch.zeros(size, device=self.device)

    def close(self) -> None:
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
        self._cache = None

    # ---- the loop

    async def _serve(self) -> None:
        self.wake()
        try:
            while self._waiting or any(s.request for s in self._slots):
                began = time.perf_counter()
                self._admit()
                rows = [s for s in self._slots if s.request]
                prefill = [s for s in rows if len(s.pending) > 1]
                decode = [s for s in rows if len(s.pending) == 1]
                # A few waiting observations are fed together: one product over many rows costs little more than one.
                if prefill and (not decode or 3 * len(prefill) >= len(decode)):
                    longest = max(len(s.pending) for s in prefill)  # padding: shorter ones go with the next group
                    self._advance([s for s in prefill if 2 * len(s.pending) >= longest])
                else:
                    self._advance(decode)
                self.busy_s += time.perf_counter() - began
                await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            self._fail(error)
            raise
        except Exception as error:  # whatever broke the loop reaches every caller instead of leaving them waiting
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        requests = self._waiting + [s.request for s in self._slots if s.request]
        self._waiting = []
        for slot in self._slots:
            slot.request, slot.session, slot.ids = None, "", []
        for request in requests:
            if not request.future.done():
                request.future.set_exception(EngineError(f"{type(error).__name__}: {error}"))

    def _admit(self) -> None:
        for request in list(self._waiting):
            slot = self._slot_for(request.session)
            if slot is None:
                return
            self._waiting.remove(request)
            common = 0
            if slot.session == request.session:
                limit = min(len(slot.ids), len(request.ids) - 1)  # at least one token is fed, to have logits
                while common < limit and slot.ids[common] == request.ids[common]:
                    common += 1
            slot.ids, slot.session, slot.request = slot.ids[:common], request.session, request

    def _slot_for(self, session: str) -> Slot | None:
        free = [s for s in self._slots if s.request is None]
        own = [s for s in free if s.session == session]
        if own or not free:
            return own[0] if own else None
        # An unowned row, lowest first, so that the live rows stay one short slice; else the longest idle.
        return min(free, key=lambda s: (s.session != "", s.last_used if s.session else s.index))

    @torch.inference_mode()
    def _advance(self, slots: list[Slot]) -> None:
        self._clock += 1
        tokens = [s.pending for s in slots]
        logits = self._forward(slots, tokens).cpu()
        temperatures = torch.tensor([s.request.sampling.temperature or 1.0 for s in slots if s.request])
        logp = torch.log_softmax(logits / temperatures[:, None], -1)
        cdf = logp.exp().cumsum(-1)
        uniform = torch.tensor([s.request.rng.random() for s in slots if s.request])
        sampled = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)[:, 0].clamp_(
            max=logits.shape[-1] - 1
        )
        greedy = [s.request.sampling.temperature == 0 for s in slots if s.request]
        if any(greedy):
            sampled = torch.where(torch.tensor(greedy), logits.argmax(-1), sampled)
        chosen = logp.gather(1, sampled[:, None])[:, 0].tolist()
        for slot, fed, token, value in zip(slots, tokens, sampled.tolist(), chosen, strict=True):
            slot.ids += fed
            slot.last_used = self._clock
            self._take(slot, token, value)

    def _take(self, slot: Slot, token: int, logprob: float) -> None:
        request = slot.request
        assert request is not None
        request.new_ids.append(token)
        request.logprobs.append(min(logprob, 0.0))
        self.num_generated += 1
        stopped = token in request.sampling.stop_ids
        full = len(request.ids) + len(request.new_ids) >= self.context
        if stopped or full or len(request.new_ids) >= request.sampling.max_new_tokens:
            completion = Completion(
                ids=request.new_ids,
                logprobs=request.logprobs,
                finish="stop" if stopped else "length",
                weight_version=self.weight_version,
            )
            slot.request = None
            if not request.future.done():
                request.future.set_result(completion)

    # ---- the model

    def _forward(self, slots: list[Slot], tokens: list[list[int]]) -> torch.Tensor:
        """Feeds ``tokens[i]`` to row ``slots[i]`` and returns the logits after the last of them, float32[B, V]."""
        s, cache = self.shape, self._cache
        assert cache is not None
        low, high, width = slots[0].index, slots[-1].index + 1, max(map(len, tokens))
        asked = [slot.index - low for slot in slots]
        dense = width == 1 and 2 * len(slots) >= high - low
        if dense:  # idle rows in between are decoded too, into a place that is written again: cheaper than to copy the cache
            by_row = {slot.index: t for slot, t in zip(slots, tokens, strict=True)}
            slots = self._slots[low:high]
            tokens = [by_row.get(slot.index, [0]) for slot in slots]
        starts = torch.tensor([len(slot.ids) for slot in slots], device=self.device)
        ids = torch.tensor([t + [0] * (width - len(t)) for t in tokens], device=self.device)
        steps = torch.arange(width, device=self.device)
        positions = (starts[:, None] + steps).clamp_(max=self.context - 1)  # [B, Q]
        reach = max(len(slot.ids) + len(t) for slot, t in zip(slots, tokens, strict=True))
        groups = s.num_heads // s.num_kv_heads
        hidden = torch.arange(reach, device=self.device) > positions[:, :, None]  # [B, Q, K]; padded queries are not read
        mask = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, float("-inf"))
        mask = mask[:, None, :, None].expand(-1, 1, -1, groups, -1).reshape(len(slots), 1, width * groups, reach)
        rows = torch.tensor([slot.index for slot in slots], device=self.device)
        contiguous = high - low == len(slots)
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        at = (rows[:, None], slice(None), positions)
        x = F.embedding(ids, self._embedding)
        for layer, (k_cache, v_cache) in zip(self._layers, cache, strict=True):
            y = F.rms_norm(x, (s.hidden,), layer.norm1, s.eps)
            qkv = F.linear(y, layer.qkv).view(len(slots), width, -1, s.head_dim)
            q, k, v = qkv.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], 2)
            q = _rope(F.rms_norm(q, (s.head_dim,), layer.q_norm, s.eps), cos, sin)
            k_cache[at] = _rope(F.rms_norm(k, (s.head_dim,), layer.k_norm, s.eps), cos, sin)
            v_cache[at] = v
            # The heads of a group become queries of their shared kv head, so that no key is copied.
            q = q.view(len(slots), width, s.num_kv_heads, groups, s.head_dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
            keys = k_cache[low:high, :, :reach] if contiguous else k_cache[:, :, :reach].index_select(0, rows)
            values = v_cache[low:high, :, :reach] if contiguous else v_cache[:, :, :reach].index_select(0, rows)
            o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            o = o.view(len(slots), s.num_kv_heads, width, groups, s.head_dim).permute(0, 2, 1, 3, 4)
            x = x + F.linear(o.reshape(len(slots), width, -1), layer.out)
            gate, up = F.linear(F.rms_norm(x, (s.hidden,), layer.norm2, s.eps), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        ends = torch.tensor([len(t) - 1 for t in tokens], device=self.device)
        last = x[torch.arange(len(slots), device=self.device), ends]
        if dense:
            last = last[torch.tensor(asked, device=self.device)]
        return F.linear(F.rms_norm(last, (s.hidden,), self._norm, s.eps), self._head)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _layer(weights: dict[str, torch.Tensor], number: int) -> Layer:
    w = {
        k.removeprefix(f"model.layers.{number}."): v
        for k, v in weights.items()
        if k.startswith(f"model.layers.{number}.")
    }
    attention = "self_attn."
    return Layer(
        qkv=torch.cat([w[f"{attention}{n}_proj.weight"] for n in "qkv"]),
        out=w[f"{attention}o_proj.weight"].clone(),
        gate_up=torch.cat([w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]]),
        down=w["mlp.down_proj.weight"].clone(),
        norm1=w["input_layernorm.weight"].clone(),
        norm2=w["post_attention_layernorm.weight"].clone(),
        q_norm=w[f"{attention}q_norm.weight"].clone(),
        k_norm=w[f"{attention}k_norm.weight"].clone(),
    )
