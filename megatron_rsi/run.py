"""One run: its folder, its processes, its engine and sandboxes, and the two things every stage does with them.

``collect`` lets the current policy attempt tasks; ``hot_swap`` puts a trainer's weights into the engine. Each rank runs
its share of the attempts and writes its own file; all ranks then read the union.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from torch import Tensor

from .base import make_base
from .checkpoint import load_hf_dir, read_hf_config
from .log import Log
from .parallel import World
from .policy import ModelConfig, Policy
from .rollout.chat import Chat
from .rollout.collect import Attempt, Collector, Counters, Limits, settled
from .rollout.engines import make_engine
from .rollout.hygiene import require_checked, require_disjoint
from .rollout.records import Task, Trajectory
from .rollout.reward import SuccessPrioritizedReward
from .rollout.store import Store
from .rollout.taskgen import generate_suites
from .rollout.tasks import load_suite
from .sandbox import SandboxPool, SandboxSpec
from .settings import Config

T = TypeVar("T")


class Run:
    """Made by ``open_run``; ends with ``close``. ``version`` counts the weights that the engine has been given."""

    def __init__(
        self, config: Config, world: World, log: Log, folder: Path, suites: dict[str, list[Task]] | None = None
    ):
        self.config, self.world, self.log, self.folder = config, world, log, folder
        self.version = 0
        self.writer: int | None = world.rank  # of this process's files; none: the only writer
        self.owner: IO[str] | None = None  # the lock of the run folder, on the first rank
        self._runner = asyncio.Runner()
        self._pool: SandboxPool | None = None
        r = config.reward
        self.reward = SuccessPrioritizedReward(
            alpha=r.alpha, rho=r.rho, margin=r.margin, kappa=r.kappa, penalty_timeout=r.penalty_timeout,
            penalty_budget=r.penalty_budget,
        )  # fmt: skip
        self.limits = Limits(
            max_new_tokens=config.engine.max_new_tokens, command_timeout_s=config.sandbox.command_timeout_s,
            num_retries=config.rollout.num_retries, max_repeats=config.rollout.max_repeats, seed=config.seed,
            concurrency=min(config.engine.max_batch, config.sandbox.pool_size),
        )  # fmt: skip
        self.suites = self._load_suites() if suites is None else suites
        self.base = Path(config.base) if config.base else self._make_base()
        self.chat = Chat.from_dir(self.base, config.rollout.chat_format)
        self.engine = make_engine(
            config.engine, self._check_fit().to_hf(), world.device,
            folder=folder / "logs" / f"sglang.{world.rank}", options=config.sglang, rank=world.rank,
        )  # fmt: skip

    def _load_suites(self) -> dict[str, list[Task]]:
        tasks = self.config.tasks
        folder = Path(tasks.suites_dir) if tasks.suites_dir else self.folder / "tasks"
        if self.world.is_main and not tasks.suites_dir:
            generate_suites(folder, self.config.seed, tasks)
        self.world.barrier()
        if not folder.is_dir():
            raise ValueError(
                f"tasks.suites_dir {folder} does not exist; make one with: python -m megatron_rsi tasks generate DIR"
            )
        paths = {p.name: p for p in sorted(folder.iterdir()) if p.is_dir() and not p.name.endswith(".partial")}
        if tasks.train_dir:
            paths["train"] = Path(tasks.train_dir)
        for needed in ("train", "validation"):
            if needed not in paths:
                raise ValueError(f"{folder} has no suite {needed!r}; it holds {sorted(paths)}")
        suites = {name: load_suite(path) for name, path in paths.items()}
        for name, suite in suites.items():
            if name != "train":
                require_disjoint(suites["train"], suite, name)
            if name not in ("train", "validation"):
                require_disjoint(suites["validation"], suite, name, of="validation")
        for name, path in paths.items():
            if tasks.require_check and (tasks.suites_dir or (name == "train" and tasks.train_dir)):
                require_checked(suites[name], path)
        return suites

    def _make_base(self) -> Path:
        with self.log.timer("train"), self.log.progress("base", self.config.base_training.steps) as bar:
            return make_base(
                self.config, self.world, self.folder / "base", lambda step, _, loss: bar.reach(step, f"loss {loss:.3f}")
            )

    def _check_fit(self) -> ModelConfig:
        """The model's shape. ValueError when tokenizer, model and configuration do not fit together."""
        shape, num_tokens = read_hf_config(self.base), self.chat.tokenizer.get_vocab_size(with_added_tokens=True)
        if num_tokens > shape.vocab_size:
            raise ValueError(
                f"{self.base}: its tokenizer has {num_tokens} tokens but the model's vocab_size is {shape.vocab_size}; "
                "tokenizer.json belongs to another model"
            )
        context = self.config.engine.context
        if context > shape.max_position_embeddings:
            raise ValueError(
                f"engine.context ({context}) exceeds the model's max_position_embeddings ({shape.max_position_embeddings}) "
                f"in {self.base}/config.json; lower engine.context"
            )
        return shape

    @property
    def deployment_harness(self) -> str:
        """The harness of evaluation, guided execution and PPO; RSR discovers with all of ``rollout.harnesses``."""
        return self.config.rollout.harnesses[0]

    @property
    def report_suites(self) -> list[str]:
        """Held-out suites: reported after every stage, never used to choose anything."""
        return [name for name in self.suites if name not in ("train", "validation")]

    @property
    def tokenizer_files(self) -> list[Path]:
        return [p for p in (self.base / "tokenizer.json", self.base / "tokenizer_config.json") if p.exists()]

    def close(self) -> None:
        if self._pool is not None:
            self._runner.run(self._pool.close(drain_s=0.0))
        self._runner.close()
        self.engine.close()
        self.log.close()

    # ---- engine
    def hot_swap(self, source: Policy | Path) -> None:
        """Puts weights into the engine under a new version number. Collective: shards are gathered by name."""
        with self.log.timer("sync"):
            self.version += 1
            tensors: Iterable[tuple[str, Tensor]]
            tensors = source.hf_tensors() if isinstance(source, Policy) else load_hf_dir(source)[1].items()
            self.engine.load_weights(tensors, self.version)
            if self.config.engine.urls:  # ranks may share a server, to which one of them sent the weights
                self.world.barrier()

    @contextmanager
    def training(self) -> Iterator[None]:
        """The trainer's turn: the engine gives its memory back. It wakes by itself with the next weights or request."""
        self.engine.sleep()
        with self.log.timer("train"):
            yield

    # ---- attempts
    def run_async(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _sandboxes(self) -> SandboxPool:
        if self._pool is None:
            s = self.config.sandbox
            spec = SandboxSpec(memory_mb=s.memory_mb, max_processes=s.max_processes, image=s.image)
            self._pool = await SandboxPool(s.kind, self.limits.concurrency, spec, s.scratch).__aenter__()
            async with self._pool.lease():  # a machine that cannot start one box is told before any attempt is made
                pass
        return self._pool

    def collect(
        self, folder: Path, name: str, attempts: Sequence[Attempt], text: str, part: str = "generate"
    ) -> list[Trajectory]:
        """Runs the attempts that are not settled in the store yet, each rank its share. Returns all of them, in order.

        Sandbox time is what passed while the engine had nothing to do; under ``part="evaluate"`` all time counts there.
        Raises ValueError when not one attempt got a verdict: there is nothing to go on with.
        """
        store = Store(folder, name, Trajectory, self.writer)
        done = settled(store.read())
        self.world.barrier()  # every rank has read before any rank writes, so all agree on what is left
        left = [a for a in attempts if a.attempt_id not in done]
        began, busy = time.perf_counter(), getattr(self.engine, "busy_s", 0.0)
        with (
            self.log.timer(part),
            self.log.progress(text, max(1, len(left[self.world.rank :: self.world.size]))) as bar,
        ):
            self.run_async(self._collect(left[self.world.rank :: self.world.size], store, bar))
            store.close()
            self.world.barrier()
        if part == "generate":
            generating = getattr(self.engine, "busy_s", 0.0) - busy
            self.log.timer.move("generate", "sandbox", max(0.0, time.perf_counter() - began - generating))
        records = store.read()
        by_id = {t.attempt_id: t for t in records} | settled(records)
        found = [by_id[a.attempt_id] for a in attempts]
        _require_a_verdict(found, text)
        return found

    async def _collect(self, attempts: list[Attempt], store: Store[Trajectory], bar: Any) -> None:
        if not attempts:
            return

        def progress(counters: Counters) -> None:
            bar.advance(1, f"passed {counters.passed}/{counters.finished}")

        collector = Collector(self.engine, await self._sandboxes(), self.chat, self.limits)
        await collector.run(attempts, store, progress)
        if collector.counters.errors:
            problems = ", ".join(f"{kind} {n}" for kind, n in sorted(collector.counters.errors.items()))
            self.log.info(f"  ended early or without a verdict: {problems}")

    def draw_tasks(self, key: str, number: int, long_share: float) -> list[Task]:
        """``number`` training tasks, a function of the seed and ``key``; ``long_share`` of them from the longer half."""
        rng = random.Random(f"{self.config.seed}:{key}")
        tasks = sorted(self.suites["train"], key=lambda t: (t.max_turns, t.task_id))
        middle = len(tasks) // 2
        num_long = round(number * long_share)
        return _draw(rng, tasks[:middle] or tasks, number - num_long) + _draw(rng, tasks[middle:] or tasks, num_long)


def _require_a_verdict(trajectories: Sequence[Trajectory], text: str) -> None:
    if not trajectories or any(t.verdict.error is None for t in trajectories):
        return
    kinds = Counter(str(t.verdict.error) for t in trajectories)
    last = trajectories[-1]
    raise ValueError(
        f"{text}: not one of {len(trajectories)} attempts got a verdict "
        f"({', '.join(f'{kind} {n}' for kind, n in kinds.most_common())}). The last, {last.attempt_id}: {last.verdict.message}"
    )


def _draw(rng: random.Random, tasks: list[Task], number: int) -> list[Task]:
    """Without replacement as far as the tasks go, then again from the start."""
    drawn: list[Task] = []
    while len(drawn) < number:
        drawn += rng.sample(tasks, min(len(tasks), number - len(drawn)))
    return drawn
