"""Runs attempts: many trials at once over one engine and a pool of sandboxes.

Every finished attempt is appended to the store before it counts, so a crash loses only attempts in flight, and a settled
attempt that is in the store is never run again. Attempts that say nothing about the policy (no working sandbox or engine, a
task that cannot run here) are stored and counted, but a later run of the same batch tries them anew.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..sandbox import ExecResult, Sandbox, SandboxError, SandboxPool
from .chat import Chat, Message
from .engines.base import EngineError, PolicyEngine, Sampling
from .errors import ERROR_POLICY, ErrorKind
from .harness import Harness, make_harness
from .integrity import evidence
from .records import Completion, Task, Trajectory, Turn, Verdict
from .store import Store
from .tasks import prepare, sandbox_spec
from .verifier import verify
from .workers import in_parallel


@dataclass(frozen=True)
class Attempt:
    """What to run. The id also seeds the sampling, so the same attempt draws the same random numbers on any rank."""

    attempt_id: str
    task: Task
    harness: str = "general"
    temperature: float = 1.0
    guidance: str = ""


@dataclass(frozen=True)
class Limits:
    max_new_tokens: int = 48
    command_timeout_s: float = 5.0
    num_retries: int = 2
    max_repeats: int = 0  # ends a trial stuck in one command, see ``Episode.num_repeats``; 0 = never
    seed: int = 0
    concurrency: int = 32
    retry_delay_s: float = 0.5
    max_failures: int = 32  # attempts in a row without a working sandbox or engine before the batch is given up


@dataclass
class Counters:
    """Live numbers for the progress display."""

    started: int = 0
    finished: int = 0
    passed: int = 0
    retried: int = 0
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)


def settled(trajectories: Iterable[Trajectory]) -> dict[str, Trajectory]:
    """Attempt id -> its trajectory, without attempts that a later run tries again. The first record of an id counts."""
    found: dict[str, Trajectory] = {}
    for trajectory in trajectories:
        error = trajectory.verdict.error
        if error is None or ERROR_POLICY[error].settled:
            found.setdefault(trajectory.attempt_id, trajectory)
    return found


class BoxTrial:
    """The harness's view of the sandbox. ``deadline`` (of the event loop's clock) ends the agent's time.

    A call to a sandbox is never cancelled, which would cost the box and with it the verdict: the agent's last command
    gets the time that is left instead.
    """

    def __init__(
        self, box: Sandbox, task: Task, limits: Limits, deadline: float = math.inf, episode: Episode | None = None
    ):
        self.box, self.task, self.limits, self.deadline = box, task, limits, deadline
        self.episode = episode or Episode()

    @property
    def left_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()

    async def execute(self, command: str) -> ExecResult:
        return await self.box.exec(command, timeout_s=max(0.01, min(self.limits.command_timeout_s, self.left_s)))

    async def passes(self) -> bool:
        verdict = await verify(self.box, self.task, self.episode.nonces)
        self.episode.flags += verdict.integrity
        return verdict.passed


@dataclass
class Episode:
    """The turns of one trial so far and the tokens the policy has seen."""

    history: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    stop_reason: ErrorKind | None = None
    nonces: list[str] = field(default_factory=list)  # of every run of the tests so far
    flags: list[str] = field(default_factory=list)  # evidence that these runs found

    @property
    def num_repeats(self) -> int:
        """How many of the last turns were the same command with the same answer."""
        repeats = 0
        for turn in reversed(self.turns):
            if (turn.command, turn.observation) != (self.turns[-1].command, self.turns[-1].observation):
                break
            repeats += 1
        return repeats

    def add(self, context: list[int], completion: Completion, command: str, observation: str, code: int | None) -> None:
        self.history += context + completion.ids
        self.turns.append(
            Turn(context_ids=context, completion=completion, command=command, observation=observation, exit_code=code)
        )


class Collector:
    """Runs attempts with one engine and one pool. Its results are records, never exceptions, save for a full disk."""

    def __init__(self, engine: PolicyEngine, pool: SandboxPool, chat: Chat, limits: Limits):
        self.engine, self.pool, self.chat, self.limits = engine, pool, chat, limits
        self.counters = Counters()
        self._num_failures = 0  # attempts in a row that ended without a working sandbox or engine

    async def run(
        self, attempts: Sequence[Attempt], store: Store[Trajectory], progress: Callable[[Counters], None] | None = None
    ) -> None:
        """Runs every attempt that is not settled in the store yet.

        Raises SandboxError or EngineError after ``max_failures`` attempts in a row that had no working sandbox or engine:
        then the machine is broken, and the same batch goes on once it is mended.
        """
        done = settled(store.read())
        waiting = [a for a in attempts if a.attempt_id not in done]

        async def work(attempt: Attempt) -> None:
            self.counters.started += 1
            trajectory = await self._with_retries(attempt)
            store.append(trajectory)
            self._count(trajectory)
            self._check_health(trajectory.verdict)
            if progress is not None:
                progress(self.counters)

        await in_parallel(waiting, work, min(self.limits.concurrency, len(waiting)))
        store.sync()

    def _check_health(self, verdict: Verdict) -> None:
        if verdict.error is None or not ERROR_POLICY[verdict.error].retry:
            self._num_failures = 0
            return
        self._num_failures += 1
        if self._num_failures >= self.limits.max_failures:
            error = EngineError if verdict.error is ErrorKind.ENGINE else SandboxError
            raise error(f"{self._num_failures} attempts in a row failed, the last with: {verdict.message}")

    def _count(self, trajectory: Trajectory) -> None:
        counters = self.counters
        counters.finished += 1
        counters.passed += trajectory.verdict.passed
        counters.num_tokens += trajectory.num_action_tokens
        for kind in (trajectory.verdict.error, trajectory.stop_reason):
            if kind is not None:
                counters.errors[kind.value] += 1

    async def _with_retries(self, attempt: Attempt) -> Trajectory:
        for number in range(self.limits.num_retries + 1):
            trajectory = await self._once(attempt)
            error = trajectory.verdict.error
            if error is None or not ERROR_POLICY[error].retry or number == self.limits.num_retries:
                return trajectory
            self.counters.retried += 1
            await asyncio.sleep(self.limits.retry_delay_s * 2**number)
        raise AssertionError("unreachable")

    async def _once(self, attempt: Attempt) -> Trajectory:
        began, episode, task = time.monotonic(), Episode(), attempt.task
        try:
            async with self.pool.lease(sandbox_spec(task, self.pool.spec)) as box:
                await prepare(box, task)
                await self._play(attempt, box, episode)
                verdict = await verify(box, task, episode.nonces)
        except SandboxError as error:
            verdict = Verdict(error=ErrorKind.INFRASTRUCTURE, message=str(error)[:500])
        except EngineError as error:
            verdict = Verdict(error=ErrorKind.ENGINE, message=str(error)[:500])
        except ValueError as error:  # a task that this back end cannot run
            verdict = Verdict(error=ErrorKind.TASK_INVALID, message=str(error)[:500])
        finally:
            self.engine.release(attempt.attempt_id)
        flags = list(dict.fromkeys(evidence(task, episode.turns, episode.nonces) + episode.flags + verdict.integrity))
        if flags:  # a cheat that also broke the verifier has failed like any other
            kind = None if verdict.error in (ErrorKind.VERIFIER_FAILED, ErrorKind.VERIFIER_TIMEOUT) else verdict.error
            verdict = Verdict(checks=verdict.checks, integrity=flags, error=kind, message=verdict.message)
        return Trajectory(
            attempt_id=attempt.attempt_id,
            task_id=task.task_id,
            harness=attempt.harness,
            turns=episode.turns,
            verdict=verdict,
            temperature=attempt.temperature,
            stop_reason=episode.stop_reason,
            guidance=attempt.guidance,
            wall_s=time.monotonic() - began,
        )

    async def _play(self, attempt: Attempt, box: Sandbox, episode: Episode) -> None:
        deadline = asyncio.get_running_loop().time() + attempt.task.agent_timeout_s
        harness, trial = make_harness(attempt.harness), BoxTrial(box, attempt.task, self.limits, deadline, episode)
        context: list[int] | None = self.chat.opening(harness.opening(attempt.task, attempt.guidance))
        while context is not None:
            context = await self._turn(attempt, harness, trial, episode, context)

    async def _turn(
        self, attempt: Attempt, harness: Harness, trial: BoxTrial, episode: Episode, context: list[int]
    ) -> list[int] | None:
        """One policy call and its effect. Returns the tokens that lead into the next turn, None at the end."""
        if trial.left_s <= 0:
            episode.stop_reason = ErrorKind.AGENT_TIMEOUT
            return None
        if len(episode.turns) >= attempt.task.max_turns:
            episode.stop_reason = ErrorKind.TURN_LIMIT
            return None
        if 0 < self.limits.max_repeats <= episode.num_repeats:
            episode.stop_reason = ErrorKind.REPEATED
            return None
        prompt = episode.history + context
        room = self.engine.context - len(prompt)
        if room <= self.limits.max_new_tokens // 4:
            episode.stop_reason = ErrorKind.CONTEXT_LIMIT
            return None
        sampling = Sampling(
            temperature=attempt.temperature,
            max_new_tokens=min(self.limits.max_new_tokens, room),
            stop_ids=(self.chat.stop_id,),
            seed=f"{self.limits.seed}:{attempt.attempt_id}",
        )
        try:
            async with asyncio.timeout_at(trial.deadline):
                completion = await self.engine.generate(prompt, sampling, attempt.attempt_id)
        except TimeoutError:
            episode.stop_reason = ErrorKind.AGENT_TIMEOUT
            return None
        reaction = await harness.react(self.chat.text_of(completion.ids), trial)
        episode.add(context, completion, reaction.command, reaction.observation or "", reaction.exit_code)
        if reaction.observation is None:
            return None
        return self.chat.after(completion.finish, [Message("tool", reaction.observation)])
