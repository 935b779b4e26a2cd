"""Runs a task's tests in its sandbox and reads the verdict.

Order: every agent process is dead, whatever it left in /logs/verifier and /tests is gone, only then are the tests
uploaded and run in a clean process. A missing, empty or invalid reward is an error of the verifier, never a reward of 0.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..sandbox import Sandbox, SandboxError
from .errors import ErrorKind
from .records import Check, Task, Verdict

LOGS = "/logs/verifier"
# Tests run as the same user as the agent, who may have taken away write permission or laid out links and folders: a
# reward that could not be removed, in a folder that the tests cannot write to, would be read as theirs.
CLEAN = f"""
shopt -s nullglob dotglob
empty() {{ rm -rf {LOGS} && set -- /tests/* && {{ [ $# = 0 ] || find /tests -mindepth 1 -delete; }}; }}
[ -w /logs ] && [ -w /tests ] || chmod u+rwx /logs /tests
empty 2>/dev/null || {{ chmod -R u+rwX {LOGS} /tests; empty; }} && mkdir {LOGS}
"""


@lru_cache(maxsize=4096)
def _tests(task_path: str) -> dict[str, bytes]:
    root = Path(task_path) / "tests"
    return {f"/tests/{p.relative_to(root)}": p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


async def verify(box: Sandbox, task: Task) -> Verdict:
    """Raises SandboxError when the sandbox itself fails (infrastructure)."""
    await box.kill_processes()
    await _clean(box)
    await box.write_files(_tests(task.path), executable=("/tests/test.sh",))
    script = f"/tests/test.sh > {LOGS}/test-stdout.txt 2>&1"
    result = await box.run(["/bin/bash", "-c", script], timeout_s=task.verifier_timeout_s, env=task.verifier_env)
    if result.timed_out:
        verdict = Verdict(error=ErrorKind.VERIFIER_TIMEOUT, message=f"no verdict in {task.verifier_timeout_s} s")
    else:
        verdict = await _read(box)
    await _clean(box)  # a retry harness lets the agent go on: it must find neither the tests nor what they said
    return verdict


async def _clean(box: Sandbox) -> None:
    result = await box.run(["/bin/bash", "-c", CLEAN], timeout_s=10.0)
    if result.exit_code != 0:
        raise SandboxError(f"{LOGS} and /tests could not be emptied: {result.stderr.strip()[-300:]}")


async def _optional(box: Sandbox, name: str) -> bytes | None:
    try:
        return await box.read_file(f"{LOGS}/{name}")
    except FileNotFoundError:
        return None


async def _read(box: Sandbox) -> Verdict:
    try:
        as_json = await _optional(box, "reward.json")
        as_text = await _optional(box, "reward.txt") if as_json is None else None
        report = await _optional(box, "ctrf.json")
    except OSError as error:  # too long or not readable
        return Verdict(error=ErrorKind.VERIFIER_FAILED, message=f"the tests' report cannot be read: {error}")
    return parse(as_json, as_text, report)


def parse(as_json: bytes | None, as_text: bytes | None, report: bytes | None) -> Verdict:
    """Reward files and CTRF report to a verdict.

    Passed means a reward of 1 and, when there is a report, at least one check and every check passed: an empty report
    or only skipped checks are no success.

    >>> parse(None, b"1", None).passed, parse(None, b"", None).error.value
    (True, 'verifier_failed')
    """
    reward = _reward(as_json, as_text)
    if isinstance(reward, str):
        return Verdict(error=ErrorKind.VERIFIER_FAILED, message=reward)
    if report is None:
        return Verdict(passed=reward >= 1.0, fraction=min(1.0, max(0.0, reward)))
    checks = _checks(report)
    if isinstance(checks, str):
        return Verdict(error=ErrorKind.VERIFIER_FAILED, message=checks)
    total = sum(c.weight for c in checks)
    fraction = sum(c.weight for c in checks if c.passed) / total if total else 0.0
    passed = reward >= 1.0 and bool(checks) and all(c.passed for c in checks)
    return Verdict(passed=passed, fraction=fraction, checks=checks)


def _reward(as_json: bytes | None, as_text: bytes | None) -> float | str:
    """The reward, or what is wrong with it."""
    if as_json is None and as_text is None:
        return "the tests wrote neither reward.json nor reward.txt"
    try:
        if as_json is not None:
            values = json.loads(as_json)
            number = _number(values["reward"] if "reward" in values else next(iter(values.values())))
        else:
            number = float(as_text.decode())  # type: ignore[union-attr]
    except (ValueError, TypeError, AttributeError, StopIteration, OverflowError, RecursionError) as error:
        return f"the reward file is invalid: {error!r}"
    return number if math.isfinite(number) else f"the reward is {number}"


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _checks(report: bytes) -> list[Check] | str:
    try:
        tests: Any = json.loads(report)["results"]["tests"]
        latest: dict[str, Check] = {}
        for test in tests:
            name, passed = str(test["name"]), test["status"] == "passed"
            # A name reported twice has passed only if it passed every time.
            latest[name] = Check(name=name, passed=passed and (name not in latest or latest[name].passed))
        return list(latest.values())
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return f"ctrf.json is invalid: {error!r}"
