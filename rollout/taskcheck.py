"""Checks tasks before they are admitted: the reference must pass; doing nothing and writing the verdict oneself must fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..sandbox import Sandbox, SandboxError, SandboxPool
from .hygiene import write_checked
from .integrity import VERIFIER_LOGS
from .records import Task, Verdict
from .tasks import folder_hash, load_task, prepare, sandbox_spec
from .verifier import verify
from .workers import in_parallel

# What an agent writes that wants its verdict without the work.
TAMPERED: Mapping[str, bytes] = {
    f"{VERIFIER_LOGS}/reward.txt": b"1",
    f"{VERIFIER_LOGS}/reward.json": b'{"reward": 1}',
    f"{VERIFIER_LOGS}/ctrf.json": b'{"results": {"tests": [{"name": "all", "status": "passed"}]}}',
}


@dataclass(frozen=True)
class Row:
    """One task's result. ``message`` says what is wrong; "" when ``ok``."""

    task_id: str
    ok: bool
    path: str
    hash: str = ""  # of every file of the folder; "" for a folder that cannot be read as a task
    reference: bool = False  # the reference solution passes
    nothing: float = 0.0  # fraction of checks that hold when nothing is done
    tamper: bool = False  # reward files written in advance were found and failed the attempt
    message: str = ""


def find_tasks(folder: Path) -> list[Path]:
    """Task folders at or below ``folder``."""
    return sorted({p.parent for p in folder.rglob("task.toml")} | {p.parent for p in folder.rglob("instruction.md")})


def check(folder: Path | str, sandbox_kind: str = "bubblewrap", jobs: int = 2) -> list[Row]:
    """Checks every task below ``folder``, ``jobs`` at a time, and records the verdicts in ``folder``/checked.json.

    SandboxError when no sandbox can be started at all; one that dies on one task is that task's message.
    """
    if not 1 <= jobs <= 1024:
        raise ValueError(f"jobs={jobs} must lie in [1, 1024]")
    folder = Path(folder)
    rows = asyncio.run(_check_all(find_tasks(folder), sandbox_kind, jobs))
    if rows:
        write_checked(folder, {row.hash: row.message for row in rows if row.hash})
    return rows


async def _check_all(paths: list[Path], kind: str, jobs: int) -> list[Row]:
    rows: list[Row] = []
    async with SandboxPool(kind, jobs) as pool:
        async with pool.lease():
            pass

        async def work(path: Path) -> None:
            rows.append(await _check_one(path, pool))

        await in_parallel(paths, work, jobs)
    return sorted(rows, key=lambda r: (r.task_id, r.path))


async def _check_one(path: Path, pool: SandboxPool) -> Row:
    digest = ""
    try:
        task = load_task(path)
        digest = folder_hash(task)
        if not (path / "solution" / "solve.sh").is_file():
            raise ValueError("solution/solve.sh is missing, so the task cannot be checked")
        nothing, tampered, reference = [await _trial(task, pool, act) for act in ("nothing", "tamper", "solve")]
    except (ValueError, SandboxError) as error:
        return Row(path.name, False, str(path), digest, message=str(error))
    message = _problem(task, nothing, tampered, reference)
    return Row(
        task.task_id, not message, str(path), digest, reference.passed, nothing.fraction, _is_caught(tampered), message
    )


async def _trial(task: Task, pool: SandboxPool, act: str) -> Verdict:
    async with pool.lease(sandbox_spec(task, pool.spec)) as box:
        await prepare(box, task)
        if act == "tamper":
            await box.write_files(TAMPERED)
        if act == "solve":
            await _solve(task, box)
        return await verify(box, task)


async def _solve(task: Task, box: Sandbox) -> None:
    solution = (Path(task.path) / "solution" / "solve.sh").read_bytes()
    await box.write_files({"/solution/solve.sh": solution}, executable=("/solution/solve.sh",))
    script = ["/bin/bash", "/solution/solve.sh"]
    await box.run(script, timeout_s=task.agent_timeout_s, env=task.solution_env, cwd=task.workdir)
    await box.clear("/solution")


def _is_caught(tampered: Verdict) -> bool:
    return not tampered.passed and bool(tampered.integrity)


def _problem(task: Task, nothing: Verdict, tampered: Verdict, reference: Verdict) -> str:
    for name, verdict in (("doing nothing", nothing), ("the reference solution", reference)):
        if verdict.error is not None:
            return f"the verifier failed after {name}: {verdict.message}"
    if not _is_caught(tampered):
        return "an agent that writes the reward files itself is not caught"
    if nothing.passed:
        return "an agent that does nothing passes"
    if nothing.integrity or reference.integrity:
        return f"honest work is taken for tampering: {(nothing.integrity + reference.integrity)[0]}"
    if not reference.passed:
        failed = [c.name for c in reference.checks if not c.passed]
        return f"the reference solution fails {failed or 'the tests'}"
    if abs(nothing.fraction - task.baseline_fraction) > 1e-5:
        return f"doing nothing scores {nothing.fraction:.6f} but metadata.baseline_fraction says {task.baseline_fraction:.6f}"
    return ""
