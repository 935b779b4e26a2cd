"""Harnesses: how a trial is shown to the policy and what its replies do.

Those here speak one compact form: a reply is a step number and one command (``2 mv a.txt b``), or ``done``. A harness is
one class, in a file of its own or here: ``opening`` makes the first messages, ``react`` turns a reply into an observation
or the end of the trial. ``harness_terminus.py`` shows one that speaks JSON.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from ..sandbox import ExecResult
from .chat import Message
from .records import Task

MAX_OBSERVATION_CHARS = 240


@dataclass(frozen=True)
class Reaction:
    """``observation`` is None when the trial is over."""

    observation: str | None
    command: str = ""
    exit_code: int | None = None


class Trial(Protocol):
    """What a harness may do with the sandbox. ``passes`` runs the protected verifier and tells only yes or no."""

    @property
    def execute(self) -> Callable[[str], Awaitable[ExecResult]]: ...

    @property
    def passes(self) -> Callable[[], Awaitable[bool]]: ...


class Harness(Protocol):
    name: str

    def opening(self, task: Task, guidance: str = "") -> list[Message]: ...

    async def react(self, reply: str, trial: Trial) -> Reaction: ...


def parse_reply(reply: str) -> str:
    """The command of a reply, without its step number; "" when there is none.

    One reply is one line: a second line, or a special token spelled out (``<|...``), is a model that has lost its form.
    """
    match = re.fullmatch(r"\s*(?:\d+ )?([^\n]+?)\s*", reply)
    return match.group(1).strip() if match and "<|" not in reply else ""


def render_observation(exit_code: int, stdout: str, stderr: str, timed_out: bool = False) -> str:
    """What the policy sees of a command: its output, the last part of an error message, or just ok / fail."""
    if timed_out:
        return "timeout"
    errors = [line.rsplit(": ", 1)[-1].lower() for line in stderr.splitlines() if line.strip()]
    text = "\n".join([*stdout.strip().splitlines(), *errors[-1:]])
    if len(text) > MAX_OBSERVATION_CHARS:
        half = MAX_OBSERVATION_CHARS // 2
        text = f"{text[:half]}\n[cut]\n{text[-half:]}"
    return text or ("ok" if exit_code == 0 else "fail")


def system_message(name: str, guidance: str) -> Message:
    return Message("system", f"act {name}\n{guidance}".rstrip())


class General:
    """The deployment and rewrite target: commands until ``done``."""

    name = "general"

    def opening(self, task: Task, guidance: str = "") -> list[Message]:
        return [system_message(self.name, guidance), Message("user", task.instruction)]

    async def react(self, reply: str, trial: Trial) -> Reaction:
        command = parse_reply(reply)
        if command == "done":
            return Reaction(None, command)
        if not command:
            return Reaction("say step and command or done")
        result = await trial.execute(command)
        return Reaction(
            render_observation(result.exit_code, result.stdout, result.stderr, result.timed_out),
            command,
            result.exit_code,
        )


class Stateful(General):
    """A persistent workflow state with checked transitions: work -> check -> done. ``done`` is refused before ``check``."""

    name = "stateful"

    def __init__(self) -> None:
        self.state = "work"

    async def react(self, reply: str, trial: Trial) -> Reaction:
        command = parse_reply(reply)
        if command == "check":
            self.state = "check"
            return Reaction("state check", command)
        if command == "done" and self.state != "check":
            return Reaction("state work check first", command)
        return await super().react(reply, trial)


class Retry(General):
    """On a claimed completion the verifier says only "not passed"; the policy may go on, ``max_retries`` times."""

    name = "retry"

    def __init__(self, max_retries: int = 2) -> None:
        self.num_retries_left = max_retries

    async def react(self, reply: str, trial: Trial) -> Reaction:
        if parse_reply(reply) == "done" and self.num_retries_left > 0:
            self.num_retries_left -= 1
            return Reaction(None, "done") if await trial.passes() else Reaction("not passed", "done")
        return await super().react(reply, trial)


def _terminus() -> Harness:
    from .harness_terminus import Terminus  # imports this module

    return Terminus()


HARNESSES: dict[str, Callable[[], Harness]] = {h.name: h for h in (General, Stateful, Retry)} | {"terminus": _terminus}


def make_harness(name: str) -> Harness:
    if name not in HARNESSES:
        raise ValueError(f"unknown harness {name!r}, expected one of {sorted(HARNESSES)}")
    return HARNESSES[name]()
