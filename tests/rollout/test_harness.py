"""The three harnesses in a real box, and a fourth: a new one is one class."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_helpers import replies_of, write_task

from megatron_rsi.rollout.collect import BoxTrial, Limits
from megatron_rsi.rollout.harness import (
    HARNESSES,
    MAX_OBSERVATION_CHARS,
    General,
    Harness,
    Reaction,
    Trial,
    make_harness,
    parse_reply,
    render_observation,
)
from megatron_rsi.rollout.records import Task
from megatron_rsi.rollout.taskgen import Composite, compose
from megatron_rsi.rollout.tasks import load_task, prepare, sandbox_spec
from megatron_rsi.sandbox import SandboxPool

COMPOSITE: Composite = compose(random.Random(3), 2, "train")
GARBAGE = [
    "",
    "   ",
    "\n",
    "1 ",
    "<|end|>",
    "a\nb",
    "1 mv a b\n2 mv c d",
    "<|user|>ls",
    "\x00\x01",
    "2 \ufffd\ufffd",
    "9" * 500,
]


@pytest.fixture()
def task(tmp_path: Path) -> Task:
    return load_task(write_task(tmp_path / "t", COMPOSITE))


def play(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, harness: Harness, replies: Sequence[str]
) -> list[Reaction]:
    async def go() -> list[Reaction]:
        async with pool.lease(sandbox_spec(task, pool.spec)) as box:
            await prepare(box, task)
            trial = BoxTrial(box, task, Limits())
            reactions: list[Reaction] = []
            for reply in replies:
                reactions.append(await harness.react(reply, trial))
                if reactions[-1].observation is None:
                    break
            return reactions

    return runner.run(go())


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("2 mv a.txt b", "mv a.txt b"), ("mv a.txt b", "mv a.txt b"), (" 2 ls \n", "ls"), ("done", "done"), ("3 done", "done"),
        ("12 ls", "ls"), ("2", "2"), (" ", ""), ("", ""), ("\n\n", ""), ("ls\npwd", ""),
        ("<|user|>x", ""), ("1 cat <|end|>", ""), ("1 sort < a.txt", "sort < a.txt"),
    ],
)  # fmt: skip
def test_replies(reply: str, command: str) -> None:
    assert parse_reply(reply) == command


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_is_a_command_or_nothing(reply: str) -> None:
    command = parse_reply(reply)
    assert "\n" not in command and "<|" not in command and command == command.strip()


def test_observations() -> None:
    assert render_observation(0, "", "") == "ok"
    assert render_observation(1, "", "") == "fail"
    assert render_observation(0, "a\nb\n", "") == "a\nb"
    assert render_observation(2, "", "grep: x.txt: No such file or directory\n") == "no such file or directory"
    assert render_observation(1, "out", "bash: line 1: x: command not found") == "out\ncommand not found"
    assert render_observation(124, "partial", "", timed_out=True) == "timeout"
    long = render_observation(0, "a" * 500 + "b" * 500, "")
    assert (
        len(long) <= MAX_OBSERVATION_CHARS + len("\n[cut]\n") and long[0] == "a" and long[-1] == "b" and "[cut]" in long
    )


@pytest.mark.parametrize("name", ["general", "stateful", "retry"])
def test_the_opening_names_the_harness_and_holds_the_guidance(name: str, task: Task) -> None:
    system, user = make_harness(name).opening(task)
    assert (system.role, system.text) == ("system", f"act {name}")
    assert (user.role, user.text) == ("user", task.instruction)
    assert make_harness(name).opening(task, "goal\n1 mv")[0].text == f"act {name}\ngoal\n1 mv"


def test_unknown_harness() -> None:
    names = r"\['general', 'retry', 'stateful', 'terminus'\]"
    with pytest.raises(ValueError, match=f"unknown harness 'x', expected one of {names}"):
        make_harness("x")


@pytest.mark.parametrize("name", ["general", "stateful", "retry"])
def test_every_harness_solves_with_the_reference(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, name: str
) -> None:
    replies = replies_of(COMPOSITE)
    if name == "stateful":
        replies.insert(-1, "check")
    reactions = play(runner, pool, task, make_harness(name), replies)
    assert len(reactions) == len(replies) and reactions[-1].observation is None
    executed = [r for r in reactions if r.exit_code is not None]
    assert [r.command for r in executed] == [c for s in COMPOSITE.subtasks for c in s.commands]
    assert all(r.exit_code == 0 for r in executed)


@pytest.mark.parametrize("name", ["general", "stateful", "retry"])
def test_garbage_is_answered_and_never_an_error(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, name: str
) -> None:
    reactions = play(runner, pool, task, make_harness(name), GARBAGE)
    assert len(reactions) == len(GARBAGE) and all(r.observation for r in reactions)
    refused = [r for reply, r in zip(GARBAGE, reactions, strict=True) if not parse_reply(reply)]
    assert len(refused) >= 7
    assert all(r == Reaction("say step and command or done") for r in refused)


def test_the_shell_persists_and_a_slow_command_is_cut(runner: asyncio.Runner, pool: SandboxPool, task: Task) -> None:
    async def go() -> list[str | None]:
        async with pool.lease(sandbox_spec(task, pool.spec)) as box:
            patient, hasty = (BoxTrial(box, task, Limits(command_timeout_s=s)) for s in (30.0, 0.5))
            replies = ["mkdir d", "cd d", "pwd", "x=5", "echo $x", "sleep 60", "pwd"]
            return [(await General().react(r, hasty if "sleep" in r else patient)).observation for r in replies]

    assert runner.run(go()) == ["ok", "ok", f"{task.workdir}/d", "ok", "5", "timeout", f"{task.workdir}/d"]


def test_stateful_refuses_done_before_check(runner: asyncio.Runner, pool: SandboxPool, task: Task) -> None:
    replies = ["done", "ls", "done", "check", "check", "pwd", "done"]
    observations = [r.observation for r in play(runner, pool, task, make_harness("stateful"), replies)]
    refused = "state work check first"
    assert [observations[n] for n in (0, 2, 3, 4, 6)] == [refused, refused, "state check", "state check", None]
    assert [r.exit_code for r in play(runner, pool, task, make_harness("stateful"), ["check", "done"])] == [None, None]


def test_a_harness_keeps_no_state_between_trials(runner: asyncio.Runner, pool: SandboxPool, task: Task) -> None:
    play(runner, pool, task, make_harness("stateful"), ["check", "done"])
    (first,) = play(runner, pool, task, make_harness("stateful"), ["done"])
    assert first.observation == "state work check first"


def test_retry_says_only_not_passed(runner: asyncio.Runner, pool: SandboxPool, task: Task) -> None:
    replies = replies_of(COMPOSITE)
    reactions = play(runner, pool, task, make_harness("retry"), ["done", *replies])
    assert reactions[0] == Reaction("not passed", "done")
    assert reactions[-1] == Reaction(None, "done") and len(reactions) == 1 + len(replies)
    gave_up = play(runner, pool, task, make_harness("retry"), ["done", "done", "done", "done"])
    assert [r.observation for r in gave_up] == ["not passed", "not passed", None]


def test_retry_says_the_same_when_the_verifier_breaks(
    runner: asyncio.Runner, pool: SandboxPool, tmp_path: Path
) -> None:
    broken = load_task(write_task(tmp_path / "t", COMPOSITE, tests="echo secret; exit 1\n"))
    reactions = play(runner, pool, broken, make_harness("retry"), ["done", "find /tests /logs -type f"])
    assert [r.observation for r in reactions] == ["not passed", "ok"], "and leaves nothing to read"


def test_a_new_harness_is_one_class(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice(General):
        """Ends on the second ``done`` and asks in between."""

        name = "twice"
        asked = False

        async def react(self, reply: str, trial: Trial) -> Reaction:
            if parse_reply(reply) == "done" and not self.asked:
                self.asked = True
                return Reaction("sure", "done")
            return await super().react(reply, trial)

    monkeypatch.setitem(HARNESSES, Twice.name, Twice)
    reactions = play(runner, pool, task, make_harness("twice"), ["pwd", "done", "done"])
    assert [r.observation for r in reactions] == [task.workdir, "sure", None]
    assert make_harness("twice").opening(task)[0].text == "act twice"
