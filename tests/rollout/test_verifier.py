"""The verdict: reward files and reports as bytes, and the protected verifier in a real box."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from rollout_helpers import write_task

from megatron_rsi.rollout.errors import ErrorKind
from megatron_rsi.rollout.records import Task, Verdict
from megatron_rsi.rollout.taskgen import Composite, compose
from megatron_rsi.rollout.tasks import load_task, prepare, sandbox_spec
from megatron_rsi.rollout.verifier import parse, verify
from megatron_rsi.sandbox import SandboxPool


def ctrf(*tests: tuple[str, str]) -> bytes:
    return json.dumps({"results": {"tests": [{"name": n, "status": s} for n, s in tests]}}).encode()


def test_json_comes_before_text() -> None:
    assert parse(b'{"reward": 1}', b"1", None).passed
    for first, second in ((b"1", b"0"), (b"0.5", b"1"), (b"1", b"junk")):
        verdict = parse(b'{"reward": ' + first + b"}", second, None)
        assert (verdict.passed, verdict.integrity) == (False, ["reward.json and reward.txt disagree"])
    assert parse(b'{"reward": 0.5}', None, None).fraction == 0.5
    assert parse(b'{"score": 1.0}', None, None).passed
    assert parse(None, b" 1.0\n", None).passed
    assert parse(b"broken", b"1", None).error is ErrorKind.VERIFIER_FAILED, "the text must not stand in for it"


@pytest.mark.parametrize(
    ("as_json", "as_text"),
    [
        (None, None), (None, b""), (None, b"one"), (None, b"nan"), (None, b"inf"), (None, b"1 1"), (None, b"\xff"),
        (b"", None), (b"{}", None), (b"[]", None), (b"1", None), (b"null", None), (b"[1]", None), (b'{"reward": null}', None),
        (b'{"reward": "1"}', None), (b'{"reward": true}', None), (b'{"reward": [1]}', None), (b'{"reward": NaN}', None),
        (b'{"reward": Infinity}', None), (b'{"reward": 1' + b"0" * 400 + b"}", None),
        (b"[" * 100_000, None), (b"\xff\xfe", None),
    ],
)  # fmt: skip
def test_no_valid_reward_is_an_error_never_a_zero(as_json: bytes | None, as_text: bytes | None) -> None:
    for report in (None, ctrf(("a", "passed"))):
        verdict = parse(as_json, as_text, report)
        assert verdict.error is ErrorKind.VERIFIER_FAILED and not verdict.passed and verdict.message


@pytest.mark.parametrize(
    "report", [b"", b"{}", b"[]", b'{"results": 3}', b'{"results": {"tests": [{"name": "a"}]}}', b"[" * 100_000]
)
def test_an_invalid_report_is_an_error(report: bytes) -> None:
    verdict = parse(None, b"1", report)
    assert verdict.error is ErrorKind.VERIFIER_FAILED and "ctrf.json is invalid" in verdict.message


@pytest.mark.parametrize(
    ("report", "passed", "fraction"),
    [
        (ctrf(), False, 0.0), (ctrf(("a", "skipped")), False, 0.0), (ctrf(("a", "passed"), ("b", "skipped")), False, 0.5),
        (ctrf(("a", "passed"), ("b", "failed")), False, 0.5), (ctrf(("a", "passed"), ("b", "passed")), True, 1.0),
        (ctrf(("a", "failed"), ("a", "passed")), False, 0.0), (ctrf(("a", "passed"), ("a", "failed")), False, 0.0),
        (ctrf(("a", "passed"), ("a", "passed"), ("b", "pending")), False, 0.5), (ctrf(("a", "PASSED")), False, 0.0),
    ],
)  # fmt: skip
def test_what_the_report_says_decides_against_a_reward_of_one(report: bytes, passed: bool, fraction: float) -> None:
    verdict = parse(None, b"1", report)
    assert (verdict.passed, verdict.fraction, verdict.error) == (passed, fraction, None)
    assert not parse(None, b"0", report).passed, "and a reward of zero against a full report"


# ---- in a real box


@pytest.fixture()
def composite() -> Composite:
    return compose(random.Random(3), 2, "train")


def solution(composite: Composite) -> str:
    return "; ".join(c for s in composite.subtasks for c in s.commands)


def judge(
    runner: asyncio.Runner, pool: SandboxPool, task: Task, command: str = "true", then: str = ""
) -> Verdict | str:
    """The verdict after ``command``; with ``then`` the output of a command after it."""

    async def go() -> Verdict | str:
        async with pool.lease(sandbox_spec(task, pool.spec)) as box:
            await prepare(box, task)
            await box.exec(command, timeout_s=10.0)
            verdict = await verify(box, task)
            return (await box.exec(then, timeout_s=10.0)).stdout if then else verdict

    return runner.run(go())


def test_done_and_not_done(runner: asyncio.Runner, pool: SandboxPool, composite: Composite, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "t", composite))
    done = judge(runner, pool, task, solution(composite))
    assert isinstance(done, Verdict) and done.passed and done.fraction == 1.0 and len(done.checks) >= 2
    nothing = judge(runner, pool, task)
    assert isinstance(nothing, Verdict) and not nothing.passed and nothing.fraction == pytest.approx(composite.baseline)


@pytest.mark.parametrize("tests", [None, "sleep 60"])
def test_neither_tests_nor_their_report_are_left(
    runner: asyncio.Runner, pool: SandboxPool, composite: Composite, tmp_path: Path, tests: str | None
) -> None:
    """Also after a time-out: a retry harness lets the agent go on."""
    replaced = {} if tests is None else {"tests": f"echo secret > /logs/verifier/reward.txt; {tests}"}
    folder = write_task(tmp_path / "t", composite, **replaced)
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("timeout_sec = 30.0", "timeout_sec = 1.0"))
    listing = judge(runner, pool, load_task(folder), then="find /tests /logs -type f; echo end")
    assert listing == "end\n"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("exit 0", "neither reward.json nor reward.txt"), ("exit 3", "neither reward.json nor reward.txt"),
        ("kill -9 $$", "neither reward.json nor reward.txt"), ("echo > /logs/verifier/reward.txt", "invalid"),
        ("echo nan > /logs/verifier/reward.txt", "nan"), ("mkdir /logs/verifier/reward.txt", "neither"),
        ("echo 1 > /logs/verifier/reward.txt; chmod 000 /logs/verifier/reward.txt", "cannot be read"),
        ("head -c 2000000 /dev/zero > /logs/verifier/reward.json", "cannot be read"),
        ("echo 1 > /logs/verifier/reward.txt; echo x > /logs/verifier/ctrf.json", "ctrf.json is invalid"),
        ("#!/no/such/interpreter", "neither reward.json nor reward.txt"),
    ],
)  # fmt: skip
def test_a_verifier_that_crashes_gives_no_grade(
    runner: asyncio.Runner, pool: SandboxPool, composite: Composite, tmp_path: Path, script: str, text: str
) -> None:
    verdict = judge(runner, pool, load_task(write_task(tmp_path / "t", composite, tests=script + "\n")))
    assert isinstance(verdict, Verdict) and verdict.error is ErrorKind.VERIFIER_FAILED
    assert text in verdict.message and not verdict.passed


def test_a_verifier_that_hangs_gives_no_grade(
    runner: asyncio.Runner, pool: SandboxPool, composite: Composite, tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "t", composite, tests="echo 1 > /logs/verifier/reward.txt; sleep 60\n")
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("timeout_sec = 30.0", "timeout_sec = 0.5"))
    verdict = judge(runner, pool, load_task(folder))
    assert isinstance(verdict, Verdict) and verdict.error is ErrorKind.VERIFIER_TIMEOUT and not verdict.passed


def test_the_exit_code_of_the_tests_is_ignored(
    runner: asyncio.Runner, pool: SandboxPool, composite: Composite, tmp_path: Path
) -> None:
    verdict = judge(
        runner,
        pool,
        load_task(write_task(tmp_path / "t", composite, tests="echo 1 > /logs/verifier/reward.txt; exit 7\n")),
    )
    assert isinstance(verdict, Verdict) and verdict.passed
