"""Checks tasks before they are admitted: the reference solution must pass, an agent that does nothing must fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from ..sandbox import SandboxError, SandboxPool
from .records import Task, Verdict
from .tasks import load_task, prepare, sandbox_spec
from .verifier import verify


@dataclass(frozen=True)
class Row:
    """One task's result. ``message`` says what is wrong; "" when ``ok``."""

    task_id: str
    ok: bool
    reference: bool = False  # the reference solution passes
    nothing: float = 0.0  # fraction of checks that hold when nothing is done
    message: str = ""


def find_tasks(folder: Path) -> list[Path]:
    """Task folders at or below ``folder``."""
    return sorted({p.parent for p in folder.rglob("task.toml")} | {p.parent for p in folder.rglob("instruction.md")})


def check(folder: Path | str, sandbox_kind: str = "bubblewrap", jobs: int = 2) -> list[Row]:
    """Checks every task below ``folder``, ``jobs`` at a time."""
    return asyncio.run(_check_all(find_tasks(Path(folder)), sandbox_kind, jobs))


async def _check_all(paths: list[Path], kind: str, jobs: int) -> list[Row]:
    rows: list[Row] = []
    queue = iter(paths)
    async with SandboxPool(kind, jobs) as pool:

        async def worker() -> None:
            for path in queue:
                rows.append(await _check_one(path, pool))

        async with asyncio.TaskGroup() as group:
            for _ in range(jobs):
                group.create_task(worker())
    return sorted(rows, key=lambda r: r.task_id)


async def _check_one(path: Path, pool: SandboxPool) -> Row:
    try:
        task = load_task(path)
        if not (path / "solution" / "solve.sh").is_file():
            return Row(path.name, False, message="solution/solve.sh is missing, so the task cannot be checked")
        nothing = await _trial(task, pool, solve=False)
        reference = await _trial(task, pool, solve=True)
    except (ValueError, SandboxError) as error:
        return Row(path.name, False, message=str(error))
    message = _problem(task, nothing, reference)
    return Row(task.task_id, not message, reference.passed, nothing.fraction, message)


async def _trial(task: Task, pool: SandboxPool, *, solve: bool) -> Verdict:
    async with pool.lease(sandbox_spec(task, pool.spec)) as box:
        await prepare(box, task)
        if solve:
            solution = (Path(task.path) / "solution" / "solve.sh").read_bytes()
            await box.write_files({"/solution/solve.sh": solution}, executable=("/solution/solve.sh",))
            await box.run(
                ["/bin/bash", "/solution/solve.sh"],
                timeout_s=task.agent_timeout_s,
                env=task.solution_env,
                cwd=task.workdir,
            )
            await box.clear("/solution")
        return await verify(box, task)


def _problem(task: Task, nothing: Verdict, reference: Verdict) -> str:
    for name, verdict in (("doing nothing", nothing), ("the reference solution", reference)):
        if verdict.error is not None:
            return f"the verifier failed after {name}: {verdict.message}"
    if nothing.passed:
        return "an agent that does nothing passes"
    if not reference.passed:
        failed = [c.name for c in reference.checks if not c.passed]
        return f"the reference solution fails {failed or 'the tests'}"
    if abs(nothing.fraction - task.baseline_fraction) > 1e-5:
        return f"doing nothing scores {nothing.fraction:.6f} but metadata.baseline_fraction says {task.baseline_fraction:.6f}"
    return ""
