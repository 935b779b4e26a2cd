"""Do trainer and engine give the same log-probs? ``doctor --parity CHECKPOINT``, alone or under torchrun."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from . import ppo
from .batch import Sample, make_batch
from .checkpoint import load_hf_dir
from .doctor import Finding
from .parallel import World
from .policy import Policy
from .rollout.engines import PolicyEngine, Sampling, make_engine
from .rollout.records import Completion
from .settings import Config

LIMITS = {"float32": 1e-4, "bfloat16": 0.05}  # of |trainer - engine|: for float32 the p99, for less the mean


def parity(config: Config, checkpoint: Path) -> Finding:
    """Puts a checkpoint into the trainer and from its shards into the engine, samples there and scores the tokens here.

    Collective: under torchrun every rank calls it, with the layout of ``config.world``.
    """
    world = World.init(config.world.tp, config.world.pp, config.world.device, threads=config.world.threads)
    shape, tensors = load_hf_dir(checkpoint)
    policy = Policy(shape, world)
    policy.load_hf(tensors)
    with tempfile.TemporaryDirectory(prefix="megatron-rsi-parity-") as folder:
        engine = make_engine(
            config.engine, shape.to_hf(), world.device, folder=Path(folder) / "engine", options=config.sglang, rank=world.rank
        )
        try:
            engine.load_weights(policy.hf_tensors(), 1)
            found = world.broadcast_object(_sample(engine, shape.vocab_size) if world.is_main else None)
            world.barrier()
        finally:
            engine.close()
    samples = [
        Sample(
            str(n), prompt + c.ids, [False] * len(prompt) + [True] * len(c.ids), [0] * (len(prompt) + len(c.ids)),
            [0.0] * len(prompt) + c.logprobs,
        )
        for n, (prompt, c) in enumerate(found)
    ]  # fmt: skip
    batch = make_batch(samples)
    logprobs: list[Any] = policy.logprobs([batch])
    gaps = ppo.engine_gap(ppo.Experience([[batch.with_(old_logprobs=logprobs[0])]], [0.0], 0), world)
    limit = LIMITS.get(shape.dtype, LIMITS["bfloat16"])
    good = gaps["engine_gap_p99" if shape.dtype == "float32" else "engine_gap"] <= limit
    layout = f"{config.engine.kind} against trainer tp={world.tp} pp={world.pp} dp={world.dp}, {shape.dtype}"
    figures = ", ".join(f"{name.removeprefix('engine_')} {value:.2e}" for name, value in gaps.items())
    return Finding("parity", "ok" if good else "problem", f"{layout}: {figures} (limit {limit:g})")


def _sample(engine: PolicyEngine, vocab_size: int) -> list[tuple[list[int], Completion]]:
    """Random prompts of several lengths and what the engine goes on with."""
    rng, room = random.Random(0), engine.context
    prompts = [[rng.randrange(vocab_size) for _ in range(max(1, room * n // 16))] for n in range(1, 9)]

    async def ask() -> list[Completion]:
        sampling = [Sampling(max_new_tokens=max(1, min(64, room // 4)), seed=str(n)) for n in range(len(prompts))]
        calls = (engine.generate(p, s, s.seed) for p, s in zip(prompts, sampling, strict=True))
        return list(await asyncio.gather(*calls))

    return list(zip(prompts, asyncio.run(ask()), strict=True))
