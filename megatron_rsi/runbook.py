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
LITERAL = re.compile(r"[A-Za-z0-9_]{6,}")
WORD = re.compile(r"\w+|[^\w\s]")
HARNESS_ARTEFACTS = ("not passed", "state check", "state work", "<|")


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
    """What only the task's files know: word n-grams, literals, canaries. ``tools`` are program names, which are no secret."""

    ngrams: frozenset[tuple[str, ...]]
    literals: frozenset[str]
    canaries: frozenset[str]


def ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    words = WORD.findall(text)
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


@lru_cache(maxsize=4096)
def secrets_of(path: str, instruction: str, start_files: tuple[tuple[str, bytes], ...]) -> Secrets:
    texts = [
        p.read_text(errors="replace")
        for name in ("tests", "solution")
        for p in sorted((Path(path) / name).rglob("*"))
        if p.is_file()
    ]
    texts += [data.decode(errors="replace") for _, data in start_files]
    solution = (
        (Path(path) / "solution" / "solve.sh").read_text(errors="replace")
        if (Path(path) / "solution/solve.sh").exists()
        else ""
    )
    tools = {line.split()[0] for line in solution.splitlines() if line.split()}
    public = set(LITERAL.findall(instruction)) | tools
    return Secrets(
        ngrams=frozenset(n for t in texts for n in ngrams(t, CODE_NGRAM)) - frozenset(ngrams(instruction, CODE_NGRAM)),
        literals=frozenset(word for t in texts for word in LITERAL.findall(t)) - frozenset(public),
        canaries=frozenset(hit for t in texts for hit in CANARY.findall(t)),
    )


def secrets(task: Task) -> Secrets:
    return secrets_of(task.path, task.instruction, tuple(sorted(environment_files(task).items())))


def screen_runbook(text: str, task: Task) -> list[str]:
    """Deterministic review. Returns the reasons to reject, [] when it is clean."""
    reasons = []
    hidden = secrets(task)
    if (
        not text.strip()
        or len(text) > MAX_RUNBOOK_CHARS
        or not text.isprintable()
        and any(not c.isprintable() and c != "\n" for c in text)
    ):
        reasons.append("format")
    if any(mark in text for mark in HARNESS_ARTEFACTS):
        reasons.append("harness")
    if (
        any(c in text for c in hidden.canaries)
        or ngrams(text, CODE_NGRAM) & hidden.ngrams
        or hidden.literals & set(LITERAL.findall(text))
    ):
        reasons.append("leak")
    if PROTECTED.search(text):
        reasons.append("path")
    return reasons


def screen_actions(turns: Iterable[Turn], task: Task) -> list[str]:
    """Values in an action that neither the instruction nor an earlier observation gave away."""
    hidden = secrets(task)
    seen: set[str] = set()
    for number, turn in enumerate(turns):
        unknown = (hidden.literals & set(LITERAL.findall(turn.command))) - seen
        if unknown:
            return [f"turn {number}: {sorted(unknown)} from nowhere"]
        if PROTECTED.search(turn.command):
            return [f"turn {number}: protected path"]
        seen |= set(LITERAL.findall(turn.observation))
    return []


def public_trajectory(trajectory: Trajectory, task: Task, chat: Chat) -> Trajectory:
    """The same trial with the private guidance erased from its opening: what SFT may see."""
    opening = chat.opening(make_harness("general").opening(task))
    first, *rest = trajectory.turns
    turns = [msgspec.structs.replace(first, context_ids=opening), *rest]
    return Trajectory(
        attempt_id=trajectory.attempt_id, task_id=trajectory.task_id, harness="general", turns=turns,
        verdict=trajectory.verdict, temperature=trajectory.temperature,
    )  # fmt: skip


def quotes_runbook(sample: Trajectory, task: Task, chat: Chat, runbook: str) -> bool:
    """Whether the tokens of a sample hold a runbook 8-gram that neither instruction nor observations gave away."""
    text = chat.tokenizer.decode(sample.tokens, skip_special_tokens=False)
    public = task.instruction + "\n" + "\n".join(t.observation for t in sample.turns)
    private = ngrams(runbook, RUNBOOK_NGRAM) - ngrams(public, RUNBOOK_NGRAM)
    return bool(private & ngrams(text, RUNBOOK_NGRAM))


def require_public(sample: Trajectory, task: Task, chat: Chat, runbook: str) -> None:
    """Asserts that no runbook text reached a training sample: every sample passes through here.

    The policy may quote its runbook in a command; callers leave such trials out first, by :func:`quotes_runbook`.
    """
    opening = chat.opening(make_harness("general").opening(task))
    assert sample.turns[0].context_ids == opening, f"{sample.attempt_id}: the opening is not the public one"
    assert not sample.guidance, f"{sample.attempt_id}: guidance is still attached"
    assert not quotes_runbook(sample, task, chat, runbook), f"{sample.attempt_id}: runbook text in a training sample"
