"""Terminus-2 replies: what is understood, what is answered to the rest, and a task solved through it in a real box."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_helpers import write_task

from megatron_rsi.rollout.collect import BoxTrial, Limits
from megatron_rsi.rollout.harness import Reaction, make_harness
from megatron_rsi.rollout.harness_terminus import CONFIRM, parse
from megatron_rsi.rollout.taskgen import Composite, compose
from megatron_rsi.rollout.tasks import load_task, prepare, sandbox_spec
from megatron_rsi.sandbox import SandboxPool

COMPOSITE: Composite = compose(random.Random(3), 2, "train")


def say(*keystrokes: str, complete: bool = False) -> str:
    commands = [{"keystrokes": k, "duration": 0.1} for k in keystrokes]
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": complete})


@pytest.mark.parametrize(
    ("reply", "commands", "warning"),
    [
        (say("ls\n"), ["ls\n"], ""),
        ("Sure:\n```json\n" + say("ls\n") + "\n```", ["ls\n"], "Extra text before"),
        (say("ls\n") + " and then we see", ["ls\n"], "Extra text after"),
        (say("ls\n")[:-24], ["ls\n"], "not closed"),
        ('{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "echo \\"hi', ['echo "hi'], "not closed"),
        ('{"analysis": "a", "plan": "two\nlines", "commands": []}', [], ""),
        ('{"commands": [{"keystrokes": "ls\\n"}]}', ["ls\n"], '"analysis"'),
        (say("cd", "ls\n"), ["cd", "ls\n"], "does not end with a newline"),
        ('{"analysis": "", "plan": "", "commands": [{"keystrokes": "a", "duration": "long"}]}', ["a"], "duration"),
    ],
)
def test_what_is_understood(reply: str, commands: list[str], warning: str) -> None:
    parsed = parse(reply)
    assert parsed.error == "" and parsed.commands == commands
    assert [w for w in parsed.warnings if warning in w] if warning else parsed.warnings == []


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("", "No valid JSON"),
        ("ls -la", "No valid JSON"),
        ("[1, 2]", "No valid JSON"),
        ("{'commands': []}", "No valid JSON"),
        ('{"analysis": "a"}', '"commands" must be a list'),
        ('{"commands": "ls"}', '"commands" must be a list'),
        ('{"commands": ["ls"]}', 'Command 1 needs the text "keystrokes"'),
        ('{"commands": [{"keystrokes": "a"}, {"keys": "b"}]}', "Command 2 needs"),
    ],
)
def test_what_is_not(reply: str, error: str) -> None:
    parsed = parse(reply)
    assert error in parsed.error and parsed.commands == []


@pytest.mark.parametrize("value", [True, "true", "Yes"])
def test_ways_to_say_complete(value: object) -> None:
    assert parse(json.dumps({"commands": [], "task_complete": value})).complete
    assert not parse(json.dumps({"commands": [], "task_complete": "no"})).complete


@given(st.text(alphabet='{}[]",:\\ \nabc"', max_size=80))
def test_no_text_breaks_the_parser(text: str) -> None:
    parsed = parse(text)
    assert parsed.error or isinstance(parsed.commands, list)
    again = parse(say("ls\n") + text)
    assert again.error == "" and again.commands == ["ls\n"]


def play(runner: asyncio.Runner, pool: SandboxPool, folder: Path, replies: list[str]) -> tuple[list[Reaction], bool]:
    task = load_task(write_task(folder, COMPOSITE))

    async def go() -> tuple[list[Reaction], bool]:
        async with pool.lease(sandbox_spec(task, pool.spec)) as box:
            await prepare(box, task)
            trial, harness = BoxTrial(box, task, Limits(command_timeout_s=20.0)), make_harness("terminus")
            assert task.instruction in harness.opening(task)[0].text
            return [await harness.react(reply, trial) for reply in replies], await trial.passes()

    return runner.run(go())


def test_a_task_is_solved_through_json(runner: asyncio.Runner, pool: SandboxPool, tmp_path: Path) -> None:
    replies = [say(*(f"{c}\n" for c in s.commands)) for s in COMPOSITE.subtasks]
    reactions, passed = play(runner, pool, tmp_path / "t", [*replies, say(complete=True), say(complete=True)])
    assert passed and reactions[-1].observation is None
    assert CONFIRM in (reactions[-2].observation or "")
    assert all(r.exit_code == 0 for r in reactions[: len(replies)])


def test_feedback_and_the_shell_persists(runner: asyncio.Runner, pool: SandboxPool, tmp_path: Path) -> None:
    replies = ["hm", "{'x': 1}", say("mkdir d\n", "cd d\n"), say("pwd\n", "echo oops >&2\n"), say("false\n"), say()]
    replies += [say(complete=True), say("true\n"), say(complete=True), say(complete=True)]
    reactions, _ = play(runner, pool, tmp_path / "t", replies)
    texts = [r.observation or "" for r in reactions]
    assert all(t.startswith("Previous response had parsing errors:\nERROR: No valid JSON") for t in texts[:2])
    assert reactions[0].exit_code is None and reactions[0].command == ""
    assert "/d\n" in texts[3] and "oops" in texts[3]
    assert reactions[4].exit_code == 1
    assert texts[5] == "New terminal output:\n$"
    assert [CONFIRM in t for t in texts[6:]] == [True, False, True, False]  # said twice in a row, or not at all
    assert [r.observation is None for r in reactions] == [False] * 9 + [True]
