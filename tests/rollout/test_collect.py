"""Many trials over one engine and one pool: every failure becomes a record, and nothing is lost or run twice."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import resource
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rollout_helpers import chat_of, model_config, replies_of, scripted, weights, write_task

from megatron_rsi.rollout.chat import Chat
from megatron_rsi.rollout.collect import Attempt, Collector, Counters, Limits, settled
from megatron_rsi.rollout.engines import EmbeddedEngine, EngineError, Sampling
from megatron_rsi.rollout.engines.scripted import ScriptedEngine
from megatron_rsi.rollout.errors import ErrorKind
from megatron_rsi.rollout.records import Completion, Task, Trajectory
from megatron_rsi.rollout.reward import SuccessPrioritizedReward
from megatron_rsi.rollout.store import Store
from megatron_rsi.rollout.taskgen import Composite, compose
from megatron_rsi.rollout.tasks import load_task
from megatron_rsi.sandbox import SandboxError, SandboxPool, SandboxSpec

COMPOSITE: Composite = compose(random.Random(3), 2, "train")
REPLIES = replies_of(COMPOSITE)
CHAT = chat_of("tiny")
REWARD = SuccessPrioritizedReward()
LIMITS = Limits(max_new_tokens=80, command_timeout_s=5.0, retry_delay_s=0.0)


@pytest.fixture()
def task(tmp_path: Path) -> Task:
    return load_task(write_task(tmp_path / "tasks" / "t", COMPOSITE))


def perfect(session: str, number: int) -> str:
    return REPLIES[min(number, len(REPLIES) - 1)]


def collect(
    runner: asyncio.Runner, pool: Any, folder: Path, engine: Any, attempts: Iterable[Attempt],
    limits: Limits = LIMITS, chat: Chat = CHAT
) -> tuple[dict[str, Trajectory], Counters]:  # fmt: skip
    collector, store = Collector(engine, pool, chat, limits), Store(folder, "rollouts", Trajectory)
    runner.run(collector.run(list(attempts), store))
    store.close()
    found = store.read()
    assert len({t.attempt_id for t in found}) == len(found), "an attempt was stored twice"
    return {t.attempt_id: t for t in found}, collector.counters


def attempts_of(task: Task, number: int, harness: str = "general", **changes: Any) -> list[Attempt]:
    return [Attempt(f"{task.task_id}/{n}", task, harness, **changes) for n in range(number)]


def changed(task: Task, **values: Any) -> Task:
    return msgspec.structs.replace(task, **values)


def test_a_perfect_policy_solves_the_task(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    found, counters = collect(runner, pool, tmp_path, scripted(CHAT, perfect), attempts_of(task, 6))
    assert (counters.started, counters.finished, counters.passed, counters.retried) == (6, 6, 6, 0)
    assert not counters.errors
    for t in found.values():
        assert t.verdict.passed and t.stop_reason is None and t.trains and REWARD.of(t, task) == 1.0
        assert [x.command for x in t.turns] == [c for s in COMPOSITE.subtasks for c in s.commands] + ["done"]
        assert sum(t.mask) == t.num_action_tokens == sum(len(CHAT.encode_text(r)) + 1 for r in REPLIES)
    assert counters.num_tokens == sum(t.num_action_tokens for t in found.values())


def test_the_stored_tokens_are_what_the_engine_saw(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    """Each prompt is the stream so far; context and reply together rebuild it exactly."""
    prompts: list[list[int]] = []
    engine = scripted(CHAT, lambda session, n: REPLIES[n] if n != 1 else "x" * 200)  # the second is cut by its length
    answer = engine.reply
    engine.reply = lambda session, ids: (prompts.append(ids), answer(session, ids))[1]
    (t,) = collect(runner, pool, tmp_path, engine, attempts_of(task, 1))[0].values()
    starts = [
        sum(len(x.context_ids) + len(x.completion.ids) for x in t.turns[:n]) + len(x.context_ids)
        for n, x in enumerate(t.turns)
    ]
    assert prompts == [t.tokens[:start] for start in starts]
    finishes = [x.completion.finish for x in t.turns]
    assert finishes[1] == "length" and len(t.turns[1].completion.ids) == LIMITS.max_new_tokens
    for n, x in enumerate(t.turns):
        assert x.completion.ids.count(CHAT.stop_id) == (finishes[n] == "stop")
        assert n == 0 or (x.context_ids[0] == CHAT.stop_id) == (finishes[n - 1] == "length"), (
            "a cut reply is closed in the context"
        )


@pytest.mark.parametrize("harness", ["general", "stateful", "retry"])
def test_a_garbage_policy_is_counted_and_never_an_error(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path, harness: str
) -> None:
    rng = random.Random(harness)

    def noise(session: str, ids: list[int]) -> list[int]:
        return [
            rng.randrange(CHAT.tokenizer.get_vocab_size()) for _ in range(rng.randrange(0, 30))
        ]  # also nothing at all

    found, counters = collect(runner, pool, tmp_path, ScriptedEngine(noise), attempts_of(task, 6, harness))
    assert counters.finished == 6 and counters.passed == 0 and counters.retried == 0
    for t in found.values():
        assert t.verdict.error is None and t.stop_reason in (ErrorKind.TURN_LIMIT, None)
        assert t.trains and REWARD.of(t, task) is not None
    assert counters.errors["turn_limit"] == sum(t.stop_reason is not None for t in found.values()) > 0


def test_a_policy_that_says_nothing_at_all_does_not_train(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    (t,) = collect(runner, pool, tmp_path, ScriptedEngine(lambda s, i: []), attempts_of(task, 1))[0].values()
    assert t.stop_reason is ErrorKind.TURN_LIMIT and t.num_action_tokens == 0 and REWARD.of(t, task) is None


def test_limits_end_a_trial_and_it_is_still_graded(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    few_turns = changed(task, max_turns=1, task_id="few")
    size = len(CHAT.opening([])) + 400
    engine = scripted(CHAT, lambda session, n: "1 echo " + "word " * 6, context=size)
    found, counters = collect(
        runner, pool, tmp_path, engine, [*attempts_of(few_turns, 1), *attempts_of(changed(task, max_turns=99), 1)]
    )
    assert found["few/0"].stop_reason is ErrorKind.TURN_LIMIT and len(found["few/0"].turns) == 1
    context = found["t/0"]
    assert (
        context.stop_reason is ErrorKind.CONTEXT_LIMIT and 1 < len(context.turns) < 99 and len(context.tokens) <= size
    )
    for t in found.values():
        assert t.verdict.error is None and t.verdict.checks and t.trains
    assert counters.errors == {"turn_limit": 1, "context_limit": 1} and counters.retried == 0


def test_a_trial_stuck_in_one_command_ends_and_is_graded(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    def reply(session: str, n: int) -> str:  # two of one kind, then the same wrong command for ever
        return "1 echo a" if n < 2 else "1 cat nothing.here"

    roomy = attempts_of(changed(task, max_turns=40), 1)
    limits = dataclasses.replace(LIMITS, max_repeats=3)
    found, counters = collect(runner, pool, tmp_path, scripted(CHAT, reply), roomy, limits)
    (t,) = found.values()
    assert t.stop_reason is ErrorKind.REPEATED and len(t.turns) == 5 and counters.errors == {"repeated": 1}
    assert t.trains and t.verdict.error is None and REWARD.of(t, task) == pytest.approx(-0.05)
    (free,) = collect(runner, pool, tmp_path / "free", scripted(CHAT, reply), roomy)[0].values()
    assert free.stop_reason is ErrorKind.TURN_LIMIT and len(free.turns) == 40


def test_a_prompt_that_never_fits_is_graded_but_does_not_train(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    found, _ = collect(runner, pool, tmp_path, scripted(CHAT, perfect, context=30), attempts_of(task, 1))
    (t,) = found.values()
    assert t.stop_reason is ErrorKind.CONTEXT_LIMIT and not t.turns and not t.trains and REWARD.of(t, task) is None


@pytest.mark.parametrize("where", ["command", "engine"])
def test_an_agent_time_out_is_graded_not_an_infrastructure_failure(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path, where: str
) -> None:
    """The reference first, then something slow: what was done in time counts, and the slow command is in the record."""
    engine = scripted(CHAT, lambda session, n: (REPLIES[:-1] + ["sleep 30"])[min(n, len(REPLIES) - 1)])
    if where == "engine":
        generate = engine.generate

        async def slow(ids: list[int], sampling: Sampling, session: str) -> Completion:
            completion = await generate(ids, sampling, session)
            if CHAT.text_of(completion.ids).startswith("sleep"):
                await asyncio.sleep(30)
            return completion

        engine.generate = slow  # type: ignore[method-assign]
    limits = Limits(max_new_tokens=80, command_timeout_s=20.0, retry_delay_s=0.0)
    attempts = attempts_of(changed(task, agent_timeout_s=4.0), 2)
    found, counters = collect(runner, pool, tmp_path, engine, attempts, limits)
    assert counters.retried == 0 and counters.errors == {"agent_timeout": 2}
    for t in found.values():
        assert t.stop_reason is ErrorKind.AGENT_TIMEOUT and t.verdict.error is None
        assert t.verdict.passed and REWARD.of(t, task) == 1.0
        assert (t.turns[-1].command, t.turns[-1].observation) == ("sleep 30", "timeout") or where == "engine"


class BrokenPool:
    """The first ``num_failures`` leases fail as a sandbox that cannot start does."""

    def __init__(self, pool: SandboxPool, num_failures: int):
        self.pool, self.spec, self.num_left = pool, pool.spec, num_failures

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec) -> Any:
        self.num_left -= 1
        if self.num_left >= 0:
            raise SandboxError("the sandbox did not start: no user namespaces")
        async with self.pool.lease(spec) as box:
            yield box


def test_a_sandbox_that_cannot_start_is_retried_and_never_a_reward_of_zero(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    found, counters = collect(
        runner, BrokenPool(pool, 99), tmp_path / "a", scripted(CHAT, perfect), attempts_of(task, 2)
    )
    assert counters.retried == 2 * LIMITS.num_retries and counters.errors == {"infrastructure": 2}
    for t in found.values():
        assert t.verdict.error is ErrorKind.INFRASTRUCTURE and "no user namespaces" in t.verdict.message
        assert not t.trains and REWARD.of(t, task) is None
    found, counters = collect(
        runner, BrokenPool(pool, 2), tmp_path / "b", scripted(CHAT, perfect), attempts_of(task, 1)
    )
    assert counters.retried == 2 and found["t/0"].verdict.passed and found["t/0"].verdict.error is None


def test_an_attempt_without_a_sandbox_is_tried_again_by_the_next_run(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    collect(runner, BrokenPool(pool, 3), tmp_path, scripted(CHAT, perfect), attempts_of(task, 1))
    collector, store = Collector(scripted(CHAT, perfect), pool, CHAT, LIMITS), Store(tmp_path, "rollouts", Trajectory)
    runner.run(collector.run(attempts_of(task, 2), store))
    records = store.read()
    assert [t.attempt_id for t in records].count("t/0") == 2, "the failure stays on record"
    found = settled(records)
    assert found.keys() == {"t/0", "t/1"} and all(t.verdict.passed for t in found.values())
    again = Collector(scripted(CHAT, perfect), pool, CHAT, LIMITS)
    runner.run(again.run(attempts_of(task, 2), store))
    assert again.counters.started == 0, "what is settled is not run again"


@pytest.mark.parametrize("broken", ["sandbox", "engine"])
def test_a_broken_machine_ends_the_batch(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path, broken: str
) -> None:
    """After so many failures in a row; one success in between starts the count anew."""
    engine = scripted(CHAT, perfect)
    if broken == "engine":
        engine.reply = lambda session, ids: (_ for _ in ()).throw(EngineError("connection refused"))
    boxes = BrokenPool(pool, 10**6 if broken == "sandbox" else 0)
    limits = dataclasses.replace(LIMITS, num_retries=0, max_failures=5, concurrency=2)
    error, text = (SandboxError, "no user namespaces") if broken == "sandbox" else (EngineError, "connection refused")
    with pytest.raises(error, match=f"5 attempts in a row failed, the last with: .*{text}"):
        collect(runner, boxes, tmp_path / "a", engine, attempts_of(task, 50), limits)
    stored = Store(tmp_path / "a", "rollouts", Trajectory).read()
    assert 5 <= len(stored) <= 6 and settled(stored) == {}
    alternating = scripted(CHAT, perfect)
    answer = alternating.reply

    def every_third(session: str, ids: list[int]) -> list[int]:
        if int(session.split("/")[1]) % 3:
            raise EngineError("connection reset")
        return answer(session, ids)

    alternating.reply = every_third
    narrow = dataclasses.replace(limits, concurrency=1)
    _, counters = collect(runner, pool, tmp_path / "b", alternating, attempts_of(task, 12), narrow)
    assert counters.finished == 12 and counters.passed == 4 and counters.errors == {"engine": 8}


def test_a_real_box_that_dies_is_infrastructure(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    class Dying:
        spec = pool.spec

        @asynccontextmanager
        async def lease(self, spec: SandboxSpec) -> Any:
            async with pool.lease(spec) as box:
                real = box.exec

                async def exec(command: str, **options: Any) -> Any:
                    await box.close()
                    return await real(command, **options)

                box.exec = exec  # type: ignore[method-assign]
                yield box

    found, counters = collect(runner, Dying(), tmp_path, scripted(CHAT, perfect), attempts_of(task, 1))
    assert found["t/0"].verdict.error is ErrorKind.INFRASTRUCTURE and counters.retried == LIMITS.num_retries
    found, _ = collect(runner, pool, tmp_path / "after", scripted(CHAT, perfect), attempts_of(task, 4))
    assert all(t.verdict.passed for t in found.values()), "the pool has replaced the dead boxes"


def test_a_verifier_that_crashes_is_not_retried_and_not_a_zero(
    runner: asyncio.Runner, pool: SandboxPool, tmp_path: Path
) -> None:
    task = load_task(write_task(tmp_path / "t", COMPOSITE, tests="kill -9 $$\n"))
    found, counters = collect(runner, pool, tmp_path, scripted(CHAT, perfect), attempts_of(task, 1))
    assert found["t/0"].verdict.error is ErrorKind.VERIFIER_FAILED and REWARD.of(found["t/0"], task) is None
    assert counters.retried == 0 and counters.errors == {"verifier_failed": 1}


def test_an_engine_failure_is_retried(runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    engine, failures = scripted(CHAT, perfect), {"t/0": 1, "t/1": 99}
    answer: Callable[[str, list[int]], list[int]] = engine.reply

    def flaky(session: str, ids: list[int]) -> list[int]:
        failures[session] = failures.get(session, 0) - 1
        if failures[session] >= 0:
            raise EngineError("connection reset")
        return answer(session, ids)

    engine.reply = flaky
    found, counters = collect(runner, pool, tmp_path, engine, attempts_of(task, 3))
    assert found["t/0"].verdict.passed and found["t/2"].verdict.passed
    assert found["t/1"].verdict.error is ErrorKind.ENGINE and REWARD.of(found["t/1"], task) is None
    assert counters.retried == 1 + LIMITS.num_retries


def test_one_bad_attempt_does_not_poison_the_others(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    """A task that needs an image build, one with an impossible folder, one that eats its memory and one that tampers."""
    build = load_task(write_task(tmp_path / "build", COMPOSITE, **{"environment/Dockerfile": "FROM x\nRUN make\n"}))
    impossible = changed(task, task_id="impossible", workdir="/usr/x")

    def script(session: str, number: int) -> str:
        if session.startswith("eat"):
            return ["tail -c 2G /dev/zero", "done"][min(number, 1)]
        if session.startswith("tamper"):
            return ["echo 1 > /logs/verifier/reward.txt", *REPLIES][min(number, len(REPLIES))]
        return perfect(session, number)

    bad = [changed(task, task_id=name) for name in ("eat", "tamper")]
    attempts = [a for t in (task, build, impossible, *bad) for a in attempts_of(t, 2)]
    found, counters = collect(runner, pool, tmp_path, scripted(CHAT, script), attempts)
    assert counters.finished == 10 and found["t/0"].verdict.passed and found["t/1"].verdict.passed
    for name, text in (("build", "needs an image build"), ("impossible", "workdir '/usr/x'")):
        verdict = found[f"{name}/0"].verdict
        assert verdict.error is ErrorKind.TASK_INVALID and text in verdict.message
    assert not found["eat/0"].verdict.passed and found["eat/0"].verdict.error in (None, ErrorKind.INFRASTRUCTURE)
    tampered = found["tamper/0"]
    assert not tampered.verdict.passed and tampered.verdict.integrity and REWARD.of(tampered, task) == -REWARD.kappa
    assert counters.errors["task_invalid"] == 4


def test_a_run_that_goes_on_skips_what_is_done_and_repeats_nothing(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    sessions: list[str] = []

    def script(session: str, number: int) -> str:
        sessions.append(session)
        return perfect(session, number)

    first, _ = collect(runner, pool, tmp_path, scripted(CHAT, script), attempts_of(task, 3))
    path = tmp_path / "rollouts.0.jsonl"
    path.write_bytes(path.read_bytes()[:-7])  # a crash in the middle of the third record
    sessions.clear()
    second, counters = collect(runner, pool, tmp_path, scripted(CHAT, script), attempts_of(task, 5))
    lost = (set(first) - {t.attempt_id for t in Store(tmp_path, "rollouts", Trajectory).read()[:2]}).pop()
    assert set(sessions) == {lost, "t/3", "t/4"} and counters.started == 3
    assert set(second) == {f"t/{n}" for n in range(5)}
    assert {k: v for k, v in second.items() if k in first and k != lost} == {
        k: v for k, v in first.items() if k != lost
    }


def test_a_full_disk_is_told_as_such(runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    """The one failure that ends a collection, as an OSError; what was stored before is whole."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (size,) = (
        len(msgspec.json.encode(t))
        for t in collect(runner, pool, tmp_path / "a", scripted(CHAT, perfect), attempts_of(task, 1))[0].values()
    )
    store = Store(tmp_path / "b", "rollouts", Trajectory)
    collector = Collector(scripted(CHAT, perfect), pool, CHAT, Limits(max_new_tokens=80, concurrency=2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(2.5 * size), before[1]))
    try:
        with pytest.raises(OSError):
            runner.run(collector.run(attempts_of(task, 8), store))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    store.close()
    assert len(store.read()) == 2 and all(t.verdict.passed for t in store.read())


def test_the_embedded_engine_in_the_loop(runner: asyncio.Runner, pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    """A random model: every trial is data, and the same attempts give the same tokens alone and together."""
    config = model_config(vocab_size=CHAT.tokenizer.get_vocab_size() + 1, max_position_embeddings=384)

    def engine() -> EmbeddedEngine:
        made = EmbeddedEngine(config.to_hf(), max_batch=4, context=384)
        made.load_weights(weights(config).items(), 5)
        return made

    small = changed(task, max_turns=4)
    limits = Limits(max_new_tokens=12, concurrency=4)
    together, _ = collect(runner, pool, tmp_path / "a", engine(), attempts_of(small, 6), limits)
    alone, _ = collect(
        runner, pool, tmp_path / "b", engine(), attempts_of(small, 6), Limits(max_new_tokens=12, concurrency=1)
    )
    compared = 0
    for name, attempt in together.items():
        for a, b in zip(attempt.turns, alone[name].turns, strict=False):
            if a.context_ids != b.context_ids:  # the random command `a&b` lets two jobs write in either order
                break
            assert a.completion.ids == b.completion.ids, name
            compared += 1
    assert compared >= 18, "most turns answer the same context"
    assert len({tuple(t.tokens) for t in together.values()}) == 6, "attempts draw different numbers"
    for t in together.values():
        assert t.verdict.error is None and {x.completion.weight_version for x in t.turns} == {5}
        assert all(x.completion.ids.count(CHAT.stop_id) == (x.completion.finish == "stop") for x in t.turns)
