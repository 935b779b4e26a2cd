"""Runbooks: prompts of planner and reviewer, deterministic screens, and what may enter a training sample.

The screens need no model. A runbook or an action leaks when it holds a canary, long stretches of secret text, a literal
that only the secret files know, or a protected path. Secrets are a task's tests, solution and start files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from .rollout.chat import Chat, Message
from .rollout.harness import make_harness
from .rollout.integrity import CANARY, PROTECTED
from .rollout.records import Task, Trajectory, Turn
from .rollout.tasks import environment_files

MAX_RUNBOOK_CHARS = 2000
CODE_NGRAM = 8  # tokens
RUNBOOK_NGRAM = 8  # words of a runbook that may not stand in a sample
PROSE_NGRAM = 13  # words
LITERAL = re.compile(r"\d[\d.,:-]{4,}\d|\w{6,}")
QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'")
SUBSTITUTION = re.compile(r"\$\([^()\n]*\)")  # a command inside quotes is code
PROGRAM = re.compile(r"(?:^|[|;&(`])[ \t]*(\w+)", re.MULTILINE)  # the word at the place of a command
REPORT_WORDS = frozenset({"passed", "failed", "pending", "skipped", "results", "summary", "status", "reward"})  # of CTRF
OPTION = re.compile(r"(?<!\S)--?[A-Za-z][\w-]*")
TOKEN = re.compile(r"\w+|[^\w\s]")
HARNESS_ARTEFACTS = ("not passed", "state check", "state work", "<|")
# Tools of other agent programs, which no harness here has.
FOREIGN_TOOLS = re.compile(r"\b(?:web_search|browser_\w+|str_replace_\w+|apply_patch|ask_user|execute_bash)\b")


def plan_prompt(instruction: str, replies: Iterable[str]) -> list[Message]:
    """The planner sees the public instruction and the replies of a success."""
    return [Message("system", "plan"), Message("user", instruction + "\ndid\n" + "\n".join(replies))]


def replan_prompt(first: list[Message], runbook: str, reasons: list[str]) -> list[Message]:
    """A rejected runbook goes back with its reasons."""
    return [*first, Message("assistant", runbook), Message("user", "reject " + " ".join(reasons))]


def review_prompt(instruction: str, runbook: str) -> list[Message]:
    """The reviewer sees only the public instruction and the runbook."""
    return [Message("system", "review"), Message("user", f"{instruction}\nrunbook\n{runbook}")]


def parse_review(reply: str) -> list[str]:
    """Reasons of a rejection, [] for ``ok``. A reply that is neither rejects: nothing unclear is accepted."""
    words = reply.split()
    if words == ["ok"]:
        return []
    return words[1:] if words[:1] == ["reject"] and len(words) > 1 else ["unclear"]


@dataclass(frozen=True)
class Secrets:
    """What only the task's files know, public text taken out: token and word n-grams, literals, canaries."""

    ngrams: frozenset[tuple[str, ...]]
    prose: frozenset[tuple[str, ...]]
    literals: frozenset[str]
    canaries: frozenset[str]


def ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    words = TOKEN.findall(text)
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def prose(text: str) -> set[tuple[str, ...]]:
    """13-word n-grams, blind to case and punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + PROSE_NGRAM]) for i in range(len(words) - PROSE_NGRAM + 1)}


def literals(text: str) -> set[str]:
    """Numbers, words and hashes of 6 and more characters."""
    return set(LITERAL.findall(text))


def values(code: str) -> set[str]:
    """Literals that are values in a script: those with a digit, and those between quotes. Names of programs are none."""
    quoted = " ".join(QUOTED.findall(SUBSTITUTION.sub(" ", code)))
    found = literals(quoted) | {word for word in literals(code) if any(c.isdigit() for c in word)}
    return found - set(PROGRAM.findall(code)) - REPORT_WORDS


@lru_cache(maxsize=4096)
def secrets_of(path: str, instruction: str, start_files: tuple[tuple[str, bytes], ...]) -> Secrets:
    files = [p for name in ("tests", "solution") for p in sorted((Path(path) / name).rglob("*")) if p.is_file()]
    scripts = [p.read_text(errors="replace") for p in files]
    start = [data.decode(errors="replace") for _, data in start_files]
    hidden = {word for text in scripts for word in values(text)} | {word for text in start for word in literals(text)}
    public = literals(instruction) | {word for text in scripts for word in PROGRAM.findall(text)}
    return Secrets(
        ngrams=frozenset(n for t in scripts + start for n in ngrams(t, CODE_NGRAM) - ngrams(instruction, CODE_NGRAM)),
        prose=frozenset(n for t in scripts + start for n in prose(t) - prose(instruction)),
        literals=frozenset(hidden - public),
        canaries=frozenset(hit for t in scripts for hit in CANARY.findall(t)),
    )


def secrets(task: Task) -> Secrets:
    return secrets_of(task.path, task.instruction, tuple(sorted(environment_files(task).items())))


def screen_runbook(text: str, task: Task) -> list[str]:
    """Deterministic review. Returns the reasons to reject, [] when it is clean."""
    reasons, hidden = [], secrets(task)
    if not text.strip() or len(text) > MAX_RUNBOOK_CHARS or not text.replace("\n", "").isprintable():
        reasons.append("format")
    if any(mark in text for mark in HARNESS_ARTEFACTS):
        reasons.append("harness")
    if FOREIGN_TOOLS.search(text):
        reasons.append("tool")
    copied = ngrams(text, CODE_NGRAM) & hidden.ngrams or prose(text) & hidden.prose or literals(text) & hidden.literals
    if copied or any(c in text for c in hidden.canaries):
        reasons.append("leak")
    if PROTECTED.search(text):
        reasons.append("path")
    return reasons


def screen_actions(turns: Iterable[Turn], task: Task) -> list[str]:
    """Values in an action that neither the instruction nor an earlier observation gave away."""
    hidden = secrets(task)
    seen: set[str] = set()
    for number, turn in enumerate(turns):
        unknown = (hidden.literals & literals(PROGRAM.sub(" ", OPTION.sub(" ", turn.command)))) - seen
        if unknown:
            return [f"turn {number}: {sorted(unknown)} from nowhere"]
        if PROTECTED.search(turn.command):
            return [f"turn {number}: protected path"]
        seen |= literals(turn.observation)
    return []


def public_trajectory(trajectory: Trajectory, task: Task, chat: Chat, harness: str) -> Trajectory:
    """The same trial with the private guidance erased from its opening: what SFT may see."""
    opening = chat.opening(make_harness(harness).opening(task))
    first, *rest = trajectory.turns
    turns = [msgspec.structs.replace(first, context_ids=opening), *rest]
    return Trajectory(
        attempt_id=trajectory.attempt_id, task_id=trajectory.task_id, harness=harness, turns=turns,
        verdict=trajectory.verdict, temperature=trajectory.temperature,
    )  # fmt: skip


def quotes_runbook(sample: Trajectory, task: Task, chat: Chat, runbook: str) -> bool:
    """Whether the tokens of a sample hold a runbook 8-gram that neither instruction nor observations gave away."""
    text = chat.tokenizer.decode(sample.tokens, skip_special_tokens=False)
    public = task.instruction + "\n" + "\n".join(t.observation for t in sample.turns)
    private = ngrams(runbook, RUNBOOK_NGRAM) - ngrams(public, RUNBOOK_NGRAM)
    return bool(private & ngrams(text, RUNBOOK_NGRAM))


def require_public(sample: Trajectory, task: Task, chat: Chat, runbook: str, harness: str) -> None:
    """Asserts that no runbook text reached a training sample: every sample passes through here.

    The policy may quote its runbook in a command; callers leave such trials out first, by :func:`quotes_runbook`.
    """
    opening = chat.opening(make_harness(harness).opening(task))
    assert sample.turns[0].context_ids == opening, f"{sample.attempt_id}: the opening is not the public one"
    assert not sample.guidance, f"{sample.attempt_id}: guidance is still attached"
    assert not quotes_runbook(sample, task, chat, runbook), f"{sample.attempt_id}: runbook text in a training sample"
