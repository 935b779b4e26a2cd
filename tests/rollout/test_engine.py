"""The engine seam, and the embedded engine's numbers against transformers' Qwen3."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from rollout_helpers import model_config, weights
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_rsi.rollout.engines import EmbeddedEngine, EngineError, Sampling, make_engine
from megatron_rsi.rollout.engines.scripted import ScriptedEngine
from megatron_rsi.rollout.records import Completion

STOP = 3
CONFIG = model_config()


def engine(seed: int = 0, *, max_batch: int = 4, context: int = 128, tied: bool = True) -> EmbeddedEngine:
    config = model_config(tie_word_embeddings=tied)
    made = EmbeddedEngine(config.to_hf(), max_batch=max_batch, context=context)
    made.load_weights(weights(config, seed).items(), 1)
    return made


def reference(seed: int = 0, tied: bool = True) -> Qwen3ForCausalLM:
    config = model_config(tie_word_embeddings=tied)
    model = Qwen3ForCausalLM(Qwen3Config(**config.to_hf())).float().eval()
    missing, unexpected = model.load_state_dict(weights(config, seed), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


@torch.no_grad()
def log_softmax(model: Qwen3ForCausalLM, ids: list[int], temperature: float) -> torch.Tensor:
    return torch.log_softmax(model(torch.tensor([ids])).logits[0].float() / temperature, -1)


def sampling(seed: str = "s", **changes: Any) -> Sampling:
    return Sampling(**{**dict(temperature=0.8, max_new_tokens=12, stop_ids=(STOP,), seed=seed), **changes})


async def trial(e: Any, name: str, num_turns: int = 4) -> tuple[list[int], list[tuple[int, Completion]]]:
    """A ragged multi-turn session: (all its tokens, (prompt length, completion) of every turn)."""
    rng, ids, turns = random.Random(name), [], []
    for _ in range(num_turns):
        ids += [rng.randrange(4, 90) for _ in range(rng.randrange(1, 14))]
        completion = await e.generate(ids, sampling(name, max_new_tokens=rng.randrange(2, 9)), name)
        turns.append((len(ids), completion))
        ids = ids + completion.ids
    e.release(name)
    return ids, turns


@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_equal_transformers_for_ragged_sessions_with_prefix_reuse(tied: bool) -> None:
    e, model = engine(tied=tied), reference(tied=tied)

    async def go() -> list[Any]:
        return await asyncio.gather(*(trial(e, f"t{n}") for n in range(9)))  # more sessions than rows

    for ids, turns in asyncio.run(go()):
        expected = log_softmax(model, ids, 0.8)
        for start, completion in turns:
            got = torch.tensor(completion.logprobs)
            positions = torch.arange(start, start + len(completion.ids))
            want = expected[positions - 1, ids[start : start + len(completion.ids)]]
            assert torch.allclose(got, want, atol=1e-4), (got - want).abs().max()


def test_no_token_of_a_session_is_fed_twice() -> None:
    e, fed = engine(), []
    forward = e._forward
    e._forward = lambda slots, tokens: (fed.extend(tokens), forward(slots, tokens))[1]  # type: ignore[method-assign]
    ids, turns = asyncio.run(trial(e, "t"))
    assert len(turns) == 4 and sum(fed, []) == ids[:-1]


def test_the_same_attempt_alone_or_in_a_batch_gives_the_same_tokens() -> None:
    async def alone() -> list[Any]:
        e = engine()
        return [await trial(e, f"t{n}") for n in range(6)]

    async def together(max_batch: int) -> list[Any]:
        e = engine(max_batch=max_batch)
        return await asyncio.gather(*(trial(e, f"t{n}") for n in range(6)))

    single = [ids for ids, _ in asyncio.run(alone())]
    assert [ids for ids, _ in asyncio.run(together(6))] == single
    assert [ids for ids, _ in asyncio.run(together(2))] == single


def test_tokens_follow_the_distribution_and_the_seed() -> None:
    """512 draws of one token against the exact probabilities; the same seed draws the same, another one differs."""
    e, prompt = engine(max_batch=64), [5, 6, 7]
    exact = log_softmax(reference(), prompt, 0.8)[-1].exp()

    async def go(offset: int) -> list[int]:
        names = [f"n{n + offset}" for n in range(512)]
        return [
            c.ids[0]
            for c in await asyncio.gather(*(e.generate(prompt, sampling(n, max_new_tokens=1), n) for n in names))
        ]

    first = asyncio.run(go(0))
    assert asyncio.run(go(0)) == first
    assert asyncio.run(go(1000)) != first
    counts = torch.bincount(torch.tensor(first), minlength=90) / 512
    assert float((counts - exact).abs().sum()) / 2 < 0.2  # total variation; about 0.13 for a true sample
    assert float(exact.max()) < 0.5, "a distribution this peaked would prove nothing"


def test_a_stale_prefix_is_dropped_and_the_version_travels() -> None:
    e, new = engine(seed=0), reference(seed=1)
    prompt = list(range(10, 40))

    async def call() -> Completion:
        return await e.generate(prompt, sampling(temperature=0.0, max_new_tokens=4, stop_ids=()), "s")

    old = asyncio.run(call())
    assert old.weight_version == 1
    e.load_weights(weights(CONFIG, 1).items(), 2)
    fresh = asyncio.run(call())
    assert fresh.weight_version == 2
    want = log_softmax(new, prompt + fresh.ids, 1.0)[len(prompt) - 1 :]
    assert torch.allclose(torch.tensor(fresh.logprobs), want[range(4), fresh.ids], atol=1e-4)
    assert old.logprobs != fresh.logprobs


def test_loaded_weights_are_the_engines_own() -> None:
    e, tensors = engine(), weights(CONFIG, 1)
    e.load_weights(tensors.items(), 2)

    async def call() -> Completion:
        return await e.generate([5, 6], sampling(), "s")

    before = asyncio.run(call())
    e.release("s")
    for tensor in tensors.values():
        tensor.zero_()  # the trainer goes on with its next step
    assert asyncio.run(call()) == before


def test_greedy_is_the_most_likely_token_with_its_log_prob_at_temperature_one() -> None:
    e, model, prompt = engine(), reference(), [9, 8, 7]
    completion = asyncio.run(e.generate(prompt, sampling(temperature=0.0, max_new_tokens=5, stop_ids=()), "s"))
    logp = log_softmax(model, prompt + completion.ids, 1.0)[2:7]
    assert completion.ids == logp.argmax(-1).tolist()
    assert torch.allclose(torch.tensor(completion.logprobs), logp.max(-1).values, atol=1e-4)


def test_how_a_completion_ends() -> None:
    e, prompt = engine(context=24), [9, 8, 7]
    free = asyncio.run(e.generate(prompt, sampling(temperature=0.0, max_new_tokens=6, stop_ids=()), "a"))
    assert free.finish == "length" and len(free.ids) == 6
    stop = free.ids[3]
    first = free.ids.index(stop)
    stopped = asyncio.run(e.generate(prompt, sampling(temperature=0.0, stop_ids=(stop,)), "b"))
    assert stopped.finish == "stop" and stopped.ids == free.ids[: first + 1] and stopped.ids.count(stop) == 1
    full = asyncio.run(e.generate(prompt, sampling(max_new_tokens=500, stop_ids=()), "c"))
    assert full.finish == "length" and len(prompt) + len(full.ids) == 24
    last = asyncio.run(e.generate([5] * 23, sampling(max_new_tokens=500, stop_ids=()), "d"))
    assert last.finish == "length" and len(last.ids) == 1


def test_bad_prompts_and_settings_are_refused() -> None:
    e = engine(context=24)
    for prompt in ([], [5] * 24, [5] * 100):
        with pytest.raises(ValueError, match=f"prompt of {len(prompt)} tokens does not fit a context of 24"):
            asyncio.run(e.generate(prompt, sampling(), "s"))
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature=-1.0)
    with pytest.raises(ValueError, match="max_new_tokens"):
        Sampling(max_new_tokens=0)
    with pytest.raises(ValueError, match="model_type 'qwen3', not 'llama'"):
        EmbeddedEngine({"model_type": "llama"}, max_batch=1, context=8)
    fresh = EmbeddedEngine(CONFIG.to_hf(), max_batch=1, context=8)
    with pytest.raises(EngineError, match="no weights yet"):
        asyncio.run(fresh.generate([1], sampling(), "s"))
    with pytest.raises(ValueError, match="lacks 'model.layers.1.mlp.up_proj.weight'|lacks"):
        fresh.load_weights([(n, t) for n, t in weights(CONFIG).items() if "layers.1.mlp.up" not in n], 1)


def test_weights_and_sleep_are_refused_while_requests_run() -> None:
    e = engine()

    async def go() -> None:
        running = asyncio.create_task(e.generate([5, 6], sampling(max_new_tokens=50, stop_ids=()), "s"))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="drain the engine first"):
            e.load_weights(weights(CONFIG, 1).items(), 2)
        with pytest.raises(EngineError, match="cannot sleep while requests run"):
            e.sleep()
        assert (await running).weight_version == 1
        e.load_weights(weights(CONFIG, 1).items(), 2)

    asyncio.run(go())


def test_a_cancelled_call_leaves_the_engine_free() -> None:
    """A trial whose time is up must not keep the next weights out."""
    e = engine()

    async def go() -> Completion:
        slow = [
            e.generate([5, n], sampling(max_new_tokens=100, stop_ids=()), f"s{n}") for n in range(6)
        ]  # 2 of them wait
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await asyncio.gather(*slow)
        e.load_weights(weights(CONFIG, 1).items(), 2)
        return await e.generate([5, 6], sampling(), "t")

    assert asyncio.run(go()).weight_version == 2


def test_sleep_frees_the_cache_and_wake_changes_nothing() -> None:
    e, prompt = engine(), [5, 6, 7, 8]
    before = asyncio.run(e.generate(prompt, sampling(), "s"))
    e.sleep()
    assert e._cache is None
    assert asyncio.run(e.generate(prompt, sampling(), "s")) == before  # wakes by itself
    e.sleep()
    e.wake()
    assert asyncio.run(e.generate(prompt, sampling(), "s")) == before
    e.close()


def test_a_broken_model_reaches_every_caller_and_good_weights_mend_it() -> None:
    e, bad = engine(), {n: t * float("nan") for n, t in weights(CONFIG).items()}
    e.load_weights(bad.items(), 2)

    async def go() -> list[Any]:
        calls = (e.generate([5, n], sampling(max_new_tokens=n + 1), f"s{n}") for n in range(6))
        async with asyncio.timeout(20):
            return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(go())
    assert [type(r) for r in results] == [EngineError] * 6
    e.load_weights(weights(CONFIG).items(), 3)
    assert asyncio.run(e.generate([5, 6], sampling(), "s")).weight_version == 3


def test_close_ends_who_waits() -> None:
    e = engine()

    async def go() -> None:
        call = asyncio.create_task(e.generate([5, 6], sampling(max_new_tokens=100, stop_ids=()), "s"))
        await asyncio.sleep(0.01)
        e.close()
        with pytest.raises(EngineError):
            async with asyncio.timeout(5):
                await call

    asyncio.run(go())


def test_the_scripted_engine_keeps_the_contract() -> None:
    e = ScriptedEngine(lambda session, ids: [len(ids), 8, STOP])
    made = asyncio.run(e.generate([1, 2], sampling(), "s"))
    assert made == Completion(ids=[2, 8, STOP], logprobs=[0.0] * 3, finish="stop", weight_version=0)
    cut = asyncio.run(e.generate([1, 2], sampling(max_new_tokens=2), "s"))
    assert cut.finish == "length" and cut.ids == [2, 8]
    e.load_weights(weights(CONFIG).items(), 7)
    e.release("s"), e.sleep(), e.wake(), e.close()
    assert asyncio.run(e.generate([1], sampling(), "s")).weight_version == 7


def test_make_engine_refuses_what_is_not_there() -> None:
    class Settings:
        kind, max_batch, context = "nonsense", 2, 16

    with pytest.raises(ValueError, match="engine.kind='nonsense'"):
        make_engine(Settings(), CONFIG.to_hf())
    Settings.kind = "embedded"
    assert isinstance(make_engine(Settings(), CONFIG.to_hf()), EmbeddedEngine)
