"""Runs a task's tests in its sandbox and reads the verdict.

Order: every agent process is dead; what it left for the tests to trip over fails it at once (``integrity.tampering``);
only then are the tests uploaded and run in a clean process. A missing, empty or invalid reward is an error of the
verifier, never a reward of 0.

Tests run as the agent's user, so a program of the agent that the tests themselves start could write over the verdict. A
nonce beside the reward, the tests read back, and two rewards that disagree show most of that. A program that only rewrites
the reward between the tests' last line and their end does not show: for such tasks grade in a separate environment.
"""

from __future__ import annotations

import json
import math
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..sandbox import Sandbox
from .errors import ErrorKind
from .integrity import PROTECTED_DIRECTORIES, VERIFIER_LOGS, tampering
from .records import Check, Task, Verdict

NONCE = f"{VERIFIER_LOGS}/.nonce"
REPORTS = ("reward.json", "reward.txt", "ctrf.json")
MAX_COMPARED_BYTES = 1 << 20  # a larger file of the tests is not read back


@lru_cache(maxsize=4096)
def _tests(task_path: str) -> dict[str, bytes]:
    root = Path(task_path) / "tests"
    return {f"/tests/{p.relative_to(root)}": p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


async def verify(box: Sandbox, task: Task, nonces: list[str] | None = None) -> Verdict:
    """Raises SandboxError when the sandbox itself fails (infrastructure). Appends this run's nonce to ``nonces``."""
    await box.kill_processes()
    if flags := await tampering(box, task):
        return Verdict(integrity=flags)
    nonce = secrets.token_hex(16)
    if nonces is not None:
        nonces.append(nonce)
    tests = _tests(task.path) | {NONCE: nonce.encode()}
    await box.write_files(tests, executable=("/tests/test.sh",))
    script = f"/tests/test.sh > {VERIFIER_LOGS}/test-stdout.txt 2>&1"
    result = await box.run(["/bin/bash", "-c", script], timeout_s=task.verifier_timeout_s, env=task.verifier_env)
    if flags := await _disturbed(box, tests):
        verdict = Verdict(integrity=flags)
    elif result.timed_out:
        verdict = Verdict(error=ErrorKind.VERIFIER_TIMEOUT, message=f"no verdict in {task.verifier_timeout_s} s")
    else:
        verdict = await _read(box)
    await box.clear(*PROTECTED_DIRECTORIES)  # a retry harness lets the agent go on: neither tests nor report are left
    return verdict


async def _disturbed(box: Sandbox, tests: dict[str, bytes]) -> list[str]:
    """What a program of the agent did to tests, nonce or reports while the tests ran it."""
    flags = []
    for path, data in tests.items():
        if len(data) <= MAX_COMPARED_BYTES:
            try:
                same = await box.read_file(path) == data
            except OSError:
                same = False
            flags += [] if same else [f"changed while the tests ran: {path}"]
    kinds = await box.find(REPORTS, VERIFIER_LOGS)
    return flags + [f"not a plain file: {path}" for path, kind in kinds.items() if kind in ("special", "link")]


async def _optional(box: Sandbox, name: str) -> bytes | None:
    try:
        return await box.read_file(f"{VERIFIER_LOGS}/{name}")
    except FileNotFoundError:
        return None


async def _read(box: Sandbox) -> Verdict:
    try:
        as_json = await _optional(box, "reward.json")
        as_text = await _optional(box, "reward.txt")
        report = await _optional(box, "ctrf.json")
    except OSError as error:  # too long or not readable
        return Verdict(error=ErrorKind.VERIFIER_FAILED, message=f"the tests' report cannot be read: {error}")
    return parse(as_json, as_text, report)


def parse(as_json: bytes | None, as_text: bytes | None, report: bytes | None) -> Verdict:
    """Reward files and CTRF report to a verdict.

    Passed means a reward of 1 and, when there is a report, at least one check and every check passed: an empty report
    or only skipped checks are no success. Two rewards that disagree are the work of somebody else than the tests.

    >>> parse(None, b"1", None).passed, parse(None, b"", None).error.value
    (True, 'verifier_failed')
    """
    reward = _reward(as_json, as_text)
    if isinstance(reward, str):
        return Verdict(error=ErrorKind.VERIFIER_FAILED, message=reward)
    if as_json is not None and as_text is not None and _reward(None, as_text) != reward:
        return Verdict(integrity=["reward.json and reward.txt disagree"])
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
