"""The Terminus-2 form: the policy answers in JSON with keystrokes for a terminal, and is told what was wrong with its JSON.

    {"analysis": "...", "plan": "...", "commands": [{"keystrokes": "ls\\n", "duration": 0.1}], "task_complete": false}

The keystrokes of a command are given to the box's shell, which keeps its folder and variables; there is no screen, so a
program that draws one or waits for keys does not work here. A command is waited for up to the trial's limit, whatever
``duration`` says. ``task_complete`` must be said twice in a row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..sandbox import ExecResult
from .chat import Message
from .harness import Reaction, Trial
from .records import Task

MAX_OUTPUT_CHARS = 10_000
PROMPT = """You solve a task in a Linux shell. Answer with one JSON object and nothing else:

{{
  "analysis": "what the output so far means",
  "plan": "what to do next and why",
  "commands": [{{"keystrokes": "ls -la\\n", "duration": 0.1}}],
  "task_complete": false
}}

"keystrokes" are typed exactly as they stand: a command needs "\\n" at its end to run. "duration" is how many seconds to
wait for it. "commands" may be empty. Set "task_complete" to true when the task is done.

Task:
{instruction}

You are in {workdir}.
"""
CONFIRM = (
    'You said that the task is complete. If so, answer with "task_complete": true once more; it is graded then and you '
    "cannot go on. Otherwise continue."
)


@dataclass
class Parsed:
    """``error`` is "" when ``commands`` and ``complete`` can be used; ``warnings`` are told to the policy either way."""

    commands: list[str] = field(default_factory=list)
    complete: bool = False
    error: str = ""
    warnings: list[str] = field(default_factory=list)


def parse(reply: str) -> Parsed:
    """Finds the JSON object in whatever stands around it and closes what was left open.

    >>> parse('Sure! {"analysis": "", "plan": "", "commands": [{"keystrokes": "ls\\\\n"}]').commands
    ['ls\\n']
    """
    parsed = Parsed()
    found = _object_in(reply, parsed.warnings)
    if found is None:
        parsed.error = "No valid JSON object found"
        return parsed
    for name in ("analysis", "plan"):
        if not isinstance(found.get(name), str):
            parsed.warnings.append(f'Field "{name}" should be a text')
    complete = found.get("task_complete", False)
    parsed.complete = complete is True or (isinstance(complete, str) and complete.lower() in ("true", "1", "yes"))
    commands = found.get("commands")
    if not isinstance(commands, list):
        parsed.error = 'Field "commands" must be a list'
        return parsed
    for number, command in enumerate(commands, start=1):
        keys = command.get("keystrokes") if isinstance(command, dict) else None
        if not isinstance(keys, str):
            parsed.error = f'Command {number} needs the text "keystrokes"'
            parsed.commands = []
            return parsed
        if not isinstance(command.get("duration", 1.0), (int, float)):
            parsed.warnings.append(f"Command {number}: duration should be a number, took 1.0")
        parsed.commands.append(keys)
    for number, keys in enumerate(parsed.commands[:-1], start=1):
        if not keys.endswith("\n"):
            parsed.warnings.append(f"Command {number} does not end with a newline: the next keystrokes join its line")
    return parsed


def _object_in(reply: str, warnings: list[str]) -> dict[str, Any] | None:
    decoder = json.JSONDecoder(strict=False)  # models write newlines into texts as they are
    begin = reply.find("{")
    if begin < 0:
        return None
    if reply[:begin].strip():
        warnings.append("Extra text before the JSON object")
    for text, warning in ((reply[begin:], ""), (_closed(reply[begin:]), "The JSON object was not closed")):
        try:
            value, end = decoder.raw_decode(text)
        except json.JSONDecodeError:
            continue
        if text[end:].strip():
            warnings.append("Extra text after the JSON object")
        if warning:
            warnings.append(warning)
        return value if isinstance(value, dict) else None
    return None


def _closed(text: str) -> str:
    """With the quote, brackets and braces that it leaves open."""
    open_, quoted, escaped = [], False, False
    for char in text:
        if quoted:
            quoted, escaped = (char != '"' or escaped), (char == "\\" and not escaped)
        elif char == '"':
            quoted = True
        elif char in "{[":
            open_.append("}" if char == "{" else "]")
        elif char in "}]" and open_:
            open_.pop()
    text = text + '"' if quoted else text.rstrip().removesuffix(",")
    return text + "".join(reversed(open_))


class Terminus:
    """See the module. One instance plays one trial."""

    name = "terminus"

    def __init__(self) -> None:
        self.asked = False  # whether the last reply said that the task is complete

    def opening(self, task: Task, guidance: str = "") -> list[Message]:
        prompt = PROMPT.format(instruction=task.instruction, workdir=task.workdir)
        return [Message("user", f"{prompt}\n{guidance}".rstrip())]

    async def react(self, reply: str, trial: Trial) -> Reaction:
        parsed = parse(reply)
        notes = "".join(f"\nWARNING: {text}" for text in parsed.warnings)
        if parsed.error:
            self.asked = False
            told = f"Previous response had parsing errors:\nERROR: {parsed.error}{notes}\n\nAnswer with one JSON object."
            return Reaction(told)
        lines = "".join(parsed.commands).removesuffix("\n")
        result = await trial.execute(lines) if lines.strip() else None
        code = result.exit_code if result is not None else None
        if parsed.complete and self.asked:
            return Reaction(None, lines, code)
        self.asked = parsed.complete
        parts = [f"Previous response had warnings:{notes}\n"] if notes else []
        parts += [CONFIRM + "\n"] if parsed.complete else []
        return Reaction("\n".join([*parts, f"New terminal output:\n{_screen(lines, result)}"]), lines, code)


def _screen(lines: str, result: ExecResult | None) -> str:
    if result is None:
        return "$"
    output = "\n".join(text.rstrip("\n") for text in (result.stdout, result.stderr) if text)
    if len(output) > MAX_OUTPUT_CHARS:
        half = MAX_OUTPUT_CHARS // 2
        output = f"{output[:half]}\n[... {len(output) - 2 * half} characters left out ...]\n{output[-half:]}"
    ended = "\n[not finished within the time limit: ended]" if result.timed_out else ""
    return f"$ {lines}\n{output}{ended}\n$"
