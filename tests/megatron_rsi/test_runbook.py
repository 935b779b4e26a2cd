"""Leak screens that need no model, the reviewer's answer, and what may stand in a training sample."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_rsi.rollout.chat import TINY, Chat, Message
from megatron_rsi.rollout.families import FAMILIES
from megatron_rsi.rollout.harness import make_harness
from megatron_rsi.rollout.integrity import canaries
from megatron_rsi.rollout.records import Completion, Task, Trajectory, Turn, Verdict
from megatron_rsi.rollout.taskgen import Composite, write_suite
from megatron_rsi.rollout.tasks import load_task
from megatron_rsi.runbook import (
    MAX_RUNBOOK_CHARS,
    parse_review,
    plan_prompt,
    public_trajectory,
    quotes_runbook,
    replan_prompt,
    require_public,
    review_prompt,
    screen_actions,
    screen_runbook,
)

WORDS = ["granite", "harbour", "lighthouse", "meadowlark", "nightfall", "overture"]
GENERAL = "general"
CLEAN = "goal 2 parts\n1 cat to the end then echo\n2 mv not cp\ncheck no errors\nretry when missing"


@pytest.fixture(scope="module")
def chat() -> Chat:
    tokenizer = Tokenizer(
        models.BPE(vocab={s: n for n, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([TINY.stop, *TINY.prefix.values()])
    return Chat(tokenizer, TINY)


@pytest.fixture()
def composite() -> Composite:
    """Notes, whose last word (nightfall or what stands there) is a secret, and a file to move."""
    draw, rng = iter(WORDS + ["plateau", "quarry", "riverbed"]), random.Random(1)
    notes, move = (FAMILIES[name](draw, rng) for name in ("notes", "move"))
    return Composite((notes, move), (notes.wordings[0], move.wordings[0]))


@pytest.fixture()
def task(composite: Composite, tmp_path: Path) -> Task:
    write_suite(tmp_path / "suite", [composite], "t", random.Random(0))
    return load_task(tmp_path / "suite" / "t-0000")


def turn(chat: Chat, command: str, observation: str = "ok", context: list[int] | None = None) -> Turn:
    ids = [*chat.encode_text(command), chat.stop_id]
    sampled = Completion(ids=ids, logprobs=[-0.1] * len(ids), finish="stop", weight_version=1)
    return Turn(context_ids=context or [], completion=sampled, command=command, observation=observation, exit_code=0)


def guided(chat: Chat, task: Task, runbook: str, commands: list[str]) -> Trajectory:
    """A trial of the general harness with private guidance, laid out as the collector does."""
    turns, context = [], chat.opening(make_harness("general").opening(task, runbook))
    for command in commands:
        turns.append(turn(chat, command, "ok", context))
        context = chat.after("stop", [Message("tool", "ok")])
    return Trajectory(
        attempt_id="a", task_id=task.task_id, harness="general", turns=turns,
        verdict=Verdict(passed=True, fraction=1.0), guidance=runbook
    )  # fmt: skip


def test_a_clean_runbook_passes(task: Task) -> None:
    assert screen_runbook(CLEAN, task) == []


def test_a_canary_is_a_leak(task: Task) -> None:
    for canary in canaries(task.path):
        assert screen_runbook(f"{CLEAN}\n{canary}", task) == ["leak"]


def test_a_stretch_of_secret_code_is_a_leak(task: Task) -> None:
    """Eight tokens of the tests, none of them a literal by itself; seven are no evidence."""
    script = (Path(task.path) / "tests" / "test.sh").read_text()
    assert 'passed = $total ]; then echo 1 > "$out/reward.txt"' in script
    assert screen_runbook('then echo 1 > "$out/', task) == ["leak"]
    assert screen_runbook("then echo 1 > out", task) == []


def test_public_text_is_no_leak(task: Task) -> None:
    assert screen_runbook(task.instruction, task) == []


def test_a_value_only_found_in_the_files_is_a_leak(task: Task, composite: Composite) -> None:
    secret = composite.subtasks[0].secret
    assert len(secret) >= 6 and secret not in task.instruction
    assert screen_runbook(f"{CLEAN}\nword {secret}", task) == ["leak"]
    assert screen_runbook(f"{CLEAN}\nword {secret[:5]}", task) == []


def test_programs_are_no_secret(task: Task, tmp_path: Path) -> None:
    draw, rng = iter(WORDS), random.Random(0)
    checksum = FAMILIES["checksum"](draw, rng)
    write_suite(tmp_path / "other", [Composite((checksum,), (checksum.wordings[0],))], "t", rng)
    assert screen_runbook("1 sha256sum", load_task(tmp_path / "other" / "t-0000")) == []


@pytest.mark.parametrize("text", ["", "  \n ", "a\x00b", "a\x1b[31m", "x" * (MAX_RUNBOOK_CHARS + 1)])
def test_format(task: Task, text: str) -> None:
    assert screen_runbook(text, task) == ["format"]


@pytest.mark.parametrize("text", ["1 mv\nnot passed", "state check", "state work check first", "1 mv<|end|>"])
def test_harness_artefacts(task: Task, text: str) -> None:
    assert "harness" in screen_runbook(text, task)


@pytest.mark.parametrize("tool", ["web_search", "str_replace_editor", "browser_click"])
def test_tools_of_other_agents(task: Task, tool: str) -> None:
    assert screen_runbook(f"1 {tool} x", task) == ["tool"]


def other_task(folder: Path, tests: str, instruction: str = "write the answer to out.txt") -> Task:
    (folder / "tests").mkdir(parents=True)
    for name, text in (("instruction.md", instruction), ("task.toml", 'schema_version = "1.4"'), ("tests/test.sh", tests)):
        (folder / name).write_text(text)
    return load_task(folder)


def test_programs_options_and_names_of_the_report_are_no_values(tmp_path: Path, chat: Chat) -> None:
    tests = (
        "python3 -m pytest --verbose /app/out.txt | sha256sum\n[ \"$(cat out.txt)\" = 'nightfall' ] && status=passed\n"
        "[ $(wc -c < out.txt) = 481516 ]\nprintf '{\"results\":{\"summary\":1}}'\n"
    )
    other = other_task(tmp_path / "t", tests)
    clean = ["python3 -m pytest --verbose", "sha256sum out.txt", "cat status results summary", "1 pytest", "ls --verbose"]
    for command in clean:
        assert screen_actions([turn(chat, command)], other) == [], command
        assert screen_runbook(command, other) == [], command
    for value in ("nightfall", "481516"):
        assert screen_actions([turn(chat, f"echo {value} > out.txt")], other) == [f"turn 0: ['{value}'] from nowhere"]
        assert screen_runbook(f"write {value}", other) == ["leak"]


def test_thirteen_words_of_prose_are_a_leak_in_any_case_and_punctuation(tmp_path: Path) -> None:
    prose = "the answer is that every second line of the long file has to be reversed first"
    other = other_task(tmp_path / "t", f"# {prose}\n")
    changed = ", ".join(prose.upper().split()[:13])
    assert screen_runbook(changed, other) == ["leak"]
    assert screen_runbook(", ".join(prose.upper().split()[:12]), other) == []


@pytest.mark.parametrize("path", ["/tests/test.sh", "/solution", "/logs/verifier/x"])
def test_protected_paths(task: Task, path: str) -> None:
    assert "path" in screen_runbook(f"1 cat {path}", task)
    assert "path" not in screen_runbook(f"1 cat {path.replace('/', ' ')}", task)


def test_all_reasons_are_given(task: Task) -> None:
    canary = min(canaries(task.path))
    assert screen_runbook(f"not passed \x00 {canary} /tests", task) == ["format", "harness", "leak", "path"]


def test_an_action_may_use_what_it_was_told_or_has_seen(task: Task, chat: Chat, composite: Composite) -> None:
    secret = composite.subtasks[0].secret
    seen, used = turn(chat, "1 cat x.note", f"word {secret}"), turn(chat, f"1 echo {secret} > y.txt")
    assert screen_actions([seen, used], task) == []
    assert screen_actions([used, seen], task) == [f"turn 0: ['{secret}'] from nowhere"], "seen only afterwards"
    assert screen_actions([turn(chat, f"1 echo {secret}", f"{secret}")], task) != [], "nor in its own output"
    assert screen_actions([turn(chat, c) for c in task.instruction.splitlines()], task) == []
    assert screen_actions([turn(chat, "ls"), turn(chat, "cat /tests/test.sh")], task) == ["turn 1: protected path"]


@pytest.mark.parametrize(
    ("reply", "reasons"),
    [
        ("ok", []), (" ok \n", []), ("reject leak", ["leak"]), ("reject leak parts", ["leak", "parts"]),
        ("reject", ["unclear"]),
        ("", ["unclear"]), ("okay", ["unclear"]), ("ok ok", ["unclear"]), ("not ok", ["unclear"]), ("<|end|>", ["unclear"]),
    ],
)  # fmt: skip
def test_only_a_plain_ok_accepts(reply: str, reasons: list[str]) -> None:
    assert parse_review(reply) == reasons


def test_who_sees_what(task: Task) -> None:
    """The reviewer: instruction and runbook alone. The planner: also what the success typed, never what it saw."""
    shown = "\n".join(m.text for m in review_prompt(task.instruction, CLEAN))
    assert shown == f"review\n{task.instruction}\nrunbook\n{CLEAN}"
    plan = plan_prompt(task.instruction, ["1 cat a", "done"])
    assert [m.role for m in plan] == ["system", "user"] and plan[1].text == f"{task.instruction}\ndid\n1 cat a\ndone"
    again = replan_prompt(plan, CLEAN, ["leak", "parts"])
    assert again[:2] == plan and again[2:] == [Message("assistant", CLEAN), Message("user", "reject leak parts")]


def test_the_guidance_is_erased_and_nothing_else(task: Task, chat: Chat) -> None:
    private = guided(chat, task, CLEAN, ["1 cat granite.note", "done"])
    with pytest.raises(AssertionError, match="the opening is not the public one"):
        require_public(private, task, chat, CLEAN, GENERAL)
    public = public_trajectory(private, task, chat, GENERAL)
    require_public(public, task, chat, CLEAN, GENERAL)
    text = chat.tokenizer.decode(public.tokens, skip_special_tokens=False)
    assert CLEAN not in text and "goal 2 parts" not in text and task.instruction in text
    assert public.tokens[: len(public.turns[0].context_ids)] == chat.opening(make_harness("general").opening(task))
    assert [t.completion for t in public.turns] == [t.completion for t in private.turns]
    assert public.turns[1:] == private.turns[1:]
    assert [t.exit_code for t in public.turns] == [0, 0] and sum(public.mask) == sum(private.mask)
    assert public.guidance == ""


def test_attached_guidance_and_a_quoted_runbook_are_refused(task: Task, chat: Chat) -> None:
    runbook = "goal 1 parts\n1 first read every note in turn and then write the answer down\ncheck no errors"
    quote = "1 first read every note in turn and then write"
    public = public_trajectory(guided(chat, task, runbook, [f"1 echo {quote}", "done"]), task, chat, GENERAL)
    assert quotes_runbook(public, task, chat, runbook)
    with pytest.raises(AssertionError, match="runbook text in a training sample"):
        require_public(public, task, chat, runbook, GENERAL)
    short = public_trajectory(guided(chat, task, runbook, ["1 echo first read every note in turn"]), task, chat, GENERAL)
    require_public(short, task, chat, runbook, GENERAL)  # seven words prove nothing
    with pytest.raises(AssertionError, match="guidance is still attached"):
        require_public(msgspec.structs.replace(short, guidance=runbook), task, chat, runbook, GENERAL)


def test_what_the_environment_said_too_may_be_quoted(task: Task, chat: Chat) -> None:
    words = "one two three four five six seven eight nine"
    sample = public_trajectory(guided(chat, task, words, [f"1 echo {words}", "done"]), task, chat, GENERAL)
    assert quotes_runbook(sample, task, chat, words)
    first = msgspec.structs.replace(sample.turns[0], observation=words)
    assert not quotes_runbook(msgspec.structs.replace(sample, turns=[first, *sample.turns[1:]]), task, chat, words)


def test_a_runbook_that_repeats_the_instruction_is_public(task: Task, chat: Chat) -> None:
    runbook = task.instruction
    require_public(public_trajectory(guided(chat, task, runbook, ["done"]), task, chat, GENERAL), task, chat, runbook, GENERAL)
