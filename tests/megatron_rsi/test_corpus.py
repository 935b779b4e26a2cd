"""The synthetic corpus: its shell against real bash, its masks, its seeds and where its tasks come from."""

from __future__ import annotations

import asyncio
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_rsi import corpus
from megatron_rsi.corpus import (
    Session,
    act_sample,
    batches,
    draw_messages,
    plan_sample,
    review_sample,
    sample_from,
    train_tokenizer,
)
from megatron_rsi.rollout.chat import TINY, Chat, Message
from megatron_rsi.rollout.families import WORDS
from megatron_rsi.rollout.harness import HARNESSES, parse_reply, render_observation
from megatron_rsi.rollout.taskgen import Composite, compose, group_of
from megatron_rsi.runbook import parse_review
from megatron_rsi.sandbox import SandboxPool, SandboxSpec
from megatron_rsi.settings import BaseTraining

SETTINGS, VOCABULARY = BaseTraining(), 1024  # that of the tiny preset
NOISY = BaseTraining(habit=0.4, wrong_name=0.3, useless=0.25, skip=0.05, early_done=0.02)
SILENT = BaseTraining(habit=0.0, wrong_name=0.0, useless=0.0, skip=0.0, early_done=0.0)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(train_tokenizer(0, SETTINGS, VOCABULARY), TINY)


class Recorder(Session):
    """Keeps (command, observation, exit code) of everything typed."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.typed: list[tuple[str, str, int]] = []

    def type(self, step: int, command: str) -> int:
        code = super().type(step, command)
        self.typed.append((command, self.messages[-1].text, code))
        return code


async def real(pool: SandboxPool, task: Composite, commands: list[str]) -> tuple[list[tuple[str, str, int]], list[str]]:
    """The same commands in real bash, and the files that are there in the end."""
    async with pool.lease() as box:
        files = {f"/app/{path}": text.encode() for path, text in task.files.items()}
        await box.write_files(files | {f"/app/{folder}/.keep": b"" for folder in task.folders})
        answers = []
        for command in commands:
            r = await box.exec(command, timeout_s=60.0)
            answers.append((command, render_observation(r.exit_code, r.stdout, r.stderr, r.timed_out), r.exit_code))
        listing = await box.exec("find * -type f ! -name .keep", timeout_s=60.0)
        return answers, sorted(listing.stdout.split())


def test_the_simulated_shell_answers_like_bash(tmp_path: Path) -> None:
    rng, sessions = random.Random(0), []
    while sum(len(s.typed) for s in sessions) < 400:
        session = Recorder(compose(rng, rng.choice((3, 6)), "train"), rng, NOISY)
        session.run(NOISY.habit)
        sessions.append(session)

    async def go() -> list[Any]:
        async with SandboxPool("bubblewrap", 1, SandboxSpec(memory_mb=256), tmp_path) as pool:
            return [await real(pool, s.task, [command for command, *_ in s.typed]) for s in sessions]

    failed = 0
    for session, (answers, files) in zip(sessions, asyncio.run(go()), strict=True):
        assert answers == session.typed
        assert files == sorted(session.shell.files)
        failed += sum(code != 0 for *_, code in answers)
    assert failed > 20, "errors were compared too"
    assert {s.family for session in sessions for s in session.task.subtasks} >= set(
        corpus.compose.__globals__["FAMILIES"]
    )


def test_without_noise_every_session_does_all_of_its_task() -> None:
    rng = random.Random(0)
    for _ in range(60):
        task = compose(rng, 4, "train")
        session = Recorder(task, rng, SILENT)
        session.run(0.0)
        assert session.failed_steps() == []
        assert [c for c, *_ in session.typed] == [c for s in task.subtasks for c in s.commands]
        careless = Recorder(task, rng, SILENT)
        careless.run(1.0)
        assert careless.failed_steps() == [1, 2, 3, 4], "every habit does harm"


def test_samples_depend_on_seed_and_step_alone(chat: Chat) -> None:
    draw, again, other = (batches(chat, SETTINGS, seed, 100, 1500, 1024) for seed in (0, 0, 1))
    for step in (0, 5, 20, 60, 99):
        later = again(step)
        assert draw(step) == later
        assert draw(step) != other(step) and draw(step) != draw(step + 1 if step < 99 else 0)
        assert 0 < sum(len(s.ids) for s in later) <= 1500
        assert all(len(s.ids) == len(s.mask) <= 1024 for s in later)


def test_longer_than_the_context_never_enters(chat: Chat) -> None:
    assert max(len(s.ids) for step in range(0, 30, 4) for s in batches(chat, SETTINGS, 0, 30, 1024, 120)(step)) <= 120


def test_the_mask_covers_the_assistant_and_its_end_token_only(chat: Chat) -> None:
    rng = random.Random(0)
    for n in range(120):
        messages = draw_messages(rng, SETTINGS, n / 120)
        sample = sample_from(chat, messages)
        assert sample.ids == chat.render(messages)
        said = [i for i, m in zip(sample.ids, sample.mask, strict=True) if m]
        assert said == [i for m in messages if m.role == "assistant" for i in [*chat.encode_text(m.text), chat.stop_id]]
        assert not sample.mask[0] and any(sample.mask)
        starts = [b for a, b in pairwise(range(len(sample.ids))) if sample.mask[b] and not sample.mask[a]]
        head = chat.opening([])
        assert all(sample.ids[start - len(head) : start] == head for start in starts), "as the policy is prompted"


def test_only_training_instances_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Composite] = []
    for name in ("compose", "compose_long"):
        make = getattr(corpus, name)
        monkeypatch.setattr(corpus, name, lambda *a, make=make: (drawn.append(make(*a)), drawn[-1])[1])
    rng = random.Random(0)
    for n in range(400):
        draw_messages(rng, SETTINGS, n / 400)
    assert len(drawn) > 200
    assert {group_of(s) for task in drawn for s in task.subtasks} == {"train"}
    held_out = [
        w for task in drawn for c, s in zip(task.clauses, task.subtasks, strict=True) if c == (w := s.wordings[-1])
    ]
    assert held_out == []


def test_each_name_after_a_space_is_one_token(chat: Chat) -> None:
    assert [word for word in WORDS if len(chat.encode_text(f" {word}")) != 1] == []
    assert chat.tokenizer.get_vocab_size() <= VOCABULARY


def test_every_name_in_a_command_follows_a_space() -> None:
    rng = random.Random(0)
    for _ in range(300):
        for subtask in compose(rng, 3, "train").subtasks:
            for text in (*subtask.commands, subtask.habit[1], *subtask.wordings):
                for word in subtask.words:
                    places = [m.start() for m in re.finditer(rf"(?<![a-z]){word}(?![a-z])", text)]
                    assert all(text[at - 1] == " " for at in places if at), text


def test_text_comes_back(chat: Chat) -> None:
    rng = random.Random(3)
    for _ in range(100):
        for message in draw_messages(rng, SETTINGS, 1.0):
            assert chat.text_of(chat.encode_text(message.text)) == message.text
    assert chat.text_of(chat.encode_text("é <|end|> \t漢")) == "é <|end|> \t漢"


@pytest.mark.parametrize("harness", list(HARNESSES))
def test_sessions_look_as_the_harness_shows_them(harness: str) -> None:
    rng = random.Random(0)
    for _ in range(40):
        task = compose(rng, 3, "train")
        system, user, *rest = act_sample(task, rng, NOISY, harness, guided=False)
        assert (system, user) == (Message("system", f"act {harness}"), Message("user", task.instruction))
        assert [m.role for m in rest] == ["assistant", "tool"] * (len(rest) // 2) + ["assistant"]
        assert rest[-1].text == "done" and all(parse_reply(m.text) for m in rest[::2])
        if harness == "stateful":
            assert "check" in [m.text for m in rest]


def test_guidance_is_what_the_collector_would_show() -> None:
    rng = random.Random(0)
    task = compose(rng, 2, "train")
    system = act_sample(task, rng, SILENT, "general", guided=True)[0]
    made = HARNESSES["general"]().opening  # type: ignore[attr-defined]
    guidance = system.text.removeprefix("act general\n")
    assert guidance.startswith("goal 2 parts\n1 ")
    assert made(type("T", (), {"instruction": task.instruction}), guidance)[0] == system


def test_plans_and_reviews_teach_the_right_answer() -> None:
    rng, verdicts = random.Random(0), []
    for _ in range(150):
        task = compose(rng, 3, "train")
        plan = plan_sample(task, rng)
        assert (
            plan[0].text == "plan"
            and plan[-1].text.splitlines()[0] == "goal 3 parts"
            and len(plan[-1].text.splitlines()) == 6
        )
        review = review_sample(task, rng)
        runbook = review[1].text.split("\nrunbook\n")[1]
        reasons = parse_review(review[-1].text)
        verdicts.append(bool(reasons))
        assert (reasons == ["parts"]) == (len(runbook.splitlines()) == 5)
        assert reasons in ([], ["leak"], ["parts"])
    assert 40 < sum(verdicts) < 110
