"""One contract for every engine: embedded, scripted and the real SGLang. Numbers are compared with transformers' Qwen3."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from rollout_helpers import model_config, weights
from test_engine import log_softmax, reference, sampling, trial

from megatron_rsi.rollout.engines import EmbeddedEngine
from megatron_rsi.rollout.engines.scripted import ScriptedEngine
from megatron_rsi.rollout.records import Completion

STOP = 3
CONFIG = model_config()
PROMPT = list(range(10, 40))


SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)


@pytest.fixture(params=["embedded", "scripted", SGLANG])
def engine(request: pytest.FixtureRequest) -> Any:
    """With weights of seed 0 under version 1."""
    if request.param == "scripted":
        made: Any = ScriptedEngine(lambda session, ids: [*range(20, 32), STOP], context=128)
    elif request.param == "embedded":
        made = EmbeddedEngine(CONFIG.to_hf(), max_batch=8, context=128)
    else:
        made = request.getfixturevalue("sglang")
    made.load_weights(weights(CONFIG, 0).items(), 1)
    return made


@pytest.fixture(params=["embedded", SGLANG])
def real(request: pytest.FixtureRequest) -> Any:
    """Engines that run a model."""
    if request.param == "embedded":
        made: Any = EmbeddedEngine(CONFIG.to_hf(), max_batch=8, context=128)
    else:
        made = request.getfixturevalue("sglang")
    made.load_weights(weights(CONFIG, 0).items(), 1)
    return made


def ask(engine: Any, prompt: list[int] = PROMPT, **changes: Any) -> Completion:
    return asyncio.run(engine.generate(prompt, sampling(**changes), "s"))


def test_a_completion_keeps_its_limits(engine: Any) -> None:
    cut = ask(engine, max_new_tokens=5, stop_ids=())
    assert cut.finish == "length" and len(cut.ids) == len(cut.logprobs) == 5
    full = ask(engine, [5] * 127, max_new_tokens=50, stop_ids=())
    assert full.finish == "length" and len(full.ids) == 1
    assert all(p <= 0 for p in cut.logprobs) and cut.weight_version == 1 and cut.version_spans == []


def test_a_stop_token_is_included_once(engine: Any) -> None:
    free = ask(engine, max_new_tokens=8, stop_ids=(), temperature=0.0)
    stop = free.ids[4]
    stopped = ask(engine, max_new_tokens=8, stop_ids=(stop,), temperature=0.0)
    assert stopped.finish == "stop" and stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.ids) and stopped.ids.count(stop) == 1


@pytest.mark.parametrize("length", [0, 128, 300])
def test_a_prompt_that_does_not_fit_is_refused(engine: Any, length: int) -> None:
    with pytest.raises(ValueError, match=f"prompt of {length} tokens does not fit a context of 128"):
        ask(engine, [5] * length)


def test_sleep_and_wake_change_nothing(engine: Any) -> None:
    before = ask(engine, temperature=0.0, stop_ids=())
    engine.sleep()
    engine.wake()
    engine.wake()
    after = ask(engine, temperature=0.0, stop_ids=())
    assert after.ids == before.ids and after.weight_version == 1
    assert torch.allclose(torch.tensor(after.logprobs), torch.tensor(before.logprobs), atol=1e-5)


def test_weights_may_come_while_the_engine_sleeps(engine: Any) -> None:
    engine.sleep()
    engine.load_weights(weights(CONFIG, 1).items(), 5)
    engine.wake()
    assert ask(engine).weight_version == 5


def test_a_cancelled_request_leaves_the_engine_free(engine: Any) -> None:
    async def go() -> Completion:
        slow = [engine.generate([5, n], sampling(max_new_tokens=120, stop_ids=()), f"s{n}") for n in range(4)]
        tasks = [asyncio.create_task(s) for s in slow]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(engine.load_weights, weights(CONFIG, 1).items(), 2)
        return await engine.generate([5, 6], sampling(), "t")

    assert asyncio.run(go()).weight_version == 2


def test_log_probs_equal_transformers_for_ragged_sessions(real: Any) -> None:
    """Prefixes are reused between turns, sessions join and leave; nine sessions over eight rows."""
    model = reference()

    async def go() -> list[Any]:
        return await asyncio.gather(*(trial(real, f"t{n}") for n in range(9)))

    for ids, turns in asyncio.run(go()):
        expected = log_softmax(model, ids, 0.8)
        for start, completion in turns:
            positions = torch.arange(start, start + len(completion.ids))
            want = expected[positions - 1, ids[start : start + len(completion.ids)]]
            assert torch.allclose(torch.tensor(completion.logprobs), want, atol=1e-4)


def test_greedy_gives_log_probs_at_temperature_one(real: Any) -> None:
    completion = ask(real, temperature=0.0, max_new_tokens=5, stop_ids=())
    logp = log_softmax(reference(), PROMPT + completion.ids, 1.0)[len(PROMPT) - 1 : -1]
    assert completion.ids == logp.argmax(-1).tolist()
    assert torch.allclose(torch.tensor(completion.logprobs), logp.max(-1).values, atol=1e-4)


def test_tokens_follow_the_distribution(real: Any) -> None:
    exact = log_softmax(reference(), [5, 6, 7], 0.8)[-1].exp()

    async def go() -> list[int]:
        calls = (real.generate([5, 6, 7], sampling(f"n{n}", max_new_tokens=1), f"n{n}") for n in range(256))
        return [c.ids[0] for c in await asyncio.gather(*calls)]

    counts = torch.bincount(torch.tensor(asyncio.run(go())), minlength=90) / 256
    assert float((counts - exact).abs().sum()) / 2 < 0.3  # total variation; about 0.18 for a true sample
    assert float(exact.max()) < 0.5, "a distribution this peaked would prove nothing"


def test_no_prefix_outlives_its_weights(real: Any) -> None:
    old = ask(real, temperature=0.0, max_new_tokens=4, stop_ids=())
    real.load_weights(weights(CONFIG, 1).items(), 2)
    fresh = ask(real, temperature=0.0, max_new_tokens=4, stop_ids=())
    assert (old.weight_version, fresh.weight_version) == (1, 2) and old.logprobs != fresh.logprobs
    want = log_softmax(reference(seed=1), PROMPT + fresh.ids, 1.0)[len(PROMPT) - 1 :]
    assert torch.allclose(torch.tensor(fresh.logprobs), want[range(4), fresh.ids], atol=1e-4)


def test_loaded_weights_are_the_engines_own(real: Any) -> None:
    tensors = weights(CONFIG, 1)
    real.load_weights(tensors.items(), 2)
    before = ask(real, temperature=0.0)
    for tensor in tensors.values():
        tensor.zero_()  # the trainer goes on with its next step
    after = ask(real, temperature=0.0)
    assert after.ids == before.ids and torch.allclose(torch.tensor(after.logprobs), torch.tensor(before.logprobs), atol=1e-5)
