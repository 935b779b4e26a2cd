"""RSR, recursive self-rewrite: the policy turns its own verified successes into clean training data. Actor only.

discover (all harnesses) -> verified successes -> planner -> screens and reviewer -> guided execution in a new sandbox
-> verify and filter -> SFT on the public history. Every arrow is a file of the stage folder, so a crash resumes there.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from .. import batch as packing
from .. import supervised
from ..checkpoint import export_hf, load_hf_dir
from ..log import Log
from ..policy import OptimizerConfig, Policy
from ..rollout.chat import Message
from ..rollout.collect import Attempt
from ..rollout.engines import Sampling
from ..rollout.records import Review, Runbook, Task, Trajectory
from ..rollout.store import Store
from ..rollout.workers import in_parallel
from ..run import Run
from ..runbook import (
    parse_review,
    plan_prompt,
    public_trajectory,
    quotes_runbook,
    replan_prompt,
    require_public,
    review_prompt,
    screen_actions,
    screen_runbook,
)
from ..settings import by_cycle

MAX_RUNBOOK_TOKENS = 160


def run(ctx: Run, stage: str, cycle: int, parent: Path, folder: Path) -> Path:
    """One RSR stage, ``rsr-1`` say, from the checkpoint ``parent``. Returns the new actor's checkpoint."""
    settings = ctx.config.rsr
    ctx.hot_swap(parent)
    tasks = {t.task_id: t for t in ctx.draw_tasks(stage, settings.num_tasks, by_cycle(settings.long_share, cycle))}
    discovered = ctx.collect(
        folder, "rollouts", discovery_attempts(ctx, stage, list(tasks.values())), f"{stage} discover"
    )
    successes = [t for t in discovered if is_clean_success(t, tasks[t.task_id])]
    sources = choose_sources(successes, random.Random(f"{ctx.config.seed}:{stage}"))
    runbooks = write_runbooks(ctx, stage, folder, sources, tasks)
    attempts = guided_attempts(ctx, stage, runbooks, tasks)
    guided = ctx.collect(folder, "guided", attempts, f"{stage} guided")
    samples = select_samples(ctx, successes, guided, tasks, random.Random(f"{ctx.config.seed}:{stage}:samples"))
    report(ctx, stage, discovered, successes, runbooks, guided, samples)
    if not samples:
        ctx.log.warning(f"{stage}: no success to learn from; the actor stays as it is")
    return fine_tune(ctx, stage, parent, folder / "actor", samples)


def discovery_attempts(ctx: Run, stage: str, tasks: Sequence[Task]) -> list[Attempt]:
    return [
        Attempt(f"{stage}.discover/{task.task_id}/{harness}/{k}", task, harness, ctx.config.rsr.temperature)
        for task in tasks
        for harness in ctx.config.rollout.harnesses
        for k in range(ctx.config.rsr.samples)
    ]


def is_clean_success(trajectory: Trajectory, task: Task) -> bool:
    """Passed the full verifier, nothing tampered with, every value of its actions accounted for."""
    return trajectory.verdict.passed and not trajectory.verdict.integrity and not screen_actions(trajectory.turns, task)


def choose_sources(successes: Sequence[Trajectory], rng: random.Random) -> list[Trajectory]:
    """One success a task to plan from, whichever harness found it; the same commands count once."""
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in successes:
        by_task[trajectory.task_id].append(trajectory)
    return [rng.choice(by_task[name]) for name in sorted(by_task)]


# ---- runbooks
def write_runbooks(
    ctx: Run, stage: str, folder: Path, sources: Sequence[Trajectory], tasks: dict[str, Task]
) -> list[Runbook]:
    """K runbooks a source, each planned, screened, reviewed, and written anew when rejected. Returns the accepted ones."""
    store = Store(folder, "runbooks", Runbook, ctx.world.rank)
    reviews = Store(folder, "reviews", Review, ctx.world.rank)
    jobs = [(s, f"{stage}.plan/{s.task_id}/{k}") for s in sources for k in range(ctx.config.rsr.runbooks)]
    done = {r.runbook_id for r in reviews.read()}
    ctx.world.barrier()
    own = [job for job in jobs if job[1] not in done][ctx.world.rank :: ctx.world.size]

    async def work(job: tuple[Trajectory, str]) -> None:
        runbook, review = await plan_one(ctx, job[1], job[0], tasks[job[0].task_id])
        store.append(runbook)
        reviews.append(review)

    with ctx.log.timer("generate"):
        ctx.run_async(in_parallel(own, work, ctx.config.engine.max_batch))
        store.close()
        reviews.close()
        ctx.world.barrier()
    accepted = {r.runbook_id for r in reviews.read() if r.accepted}
    found = {r.runbook_id: r for r in store.read()}
    return [found[name] for _, name in jobs if name in accepted]


async def plan_one(ctx: Run, name: str, source: Trajectory, task: Task) -> tuple[Runbook, Review]:
    """Plan, screen, review; a rejection goes back with its reasons, at most ``max_review_depth`` times."""
    replies = [ctx.chat.text_of(t.completion.ids) for t in source.turns if t.command and t.exit_code is not None]
    first = prompt = plan_prompt(task.instruction, replies)
    for depth in range(ctx.config.rsr.max_review_depth + 1):
        text = await complete(ctx, prompt, f"{name}/plan{depth}", MAX_RUNBOOK_TOKENS)
        runbook = Runbook(runbook_id=name, task_id=task.task_id, text=text, depth=depth)
        reasons, source_kind = screen_runbook(text, task), "screen"
        if not reasons:
            reply = await complete(ctx, review_prompt(task.instruction, text), f"{name}/review{depth}", 8)
            reasons, source_kind = parse_review(reply), "model"
        if not reasons:
            break
        prompt = replan_prompt(first, text, reasons)
    return runbook, Review(runbook_id=name, accepted=not reasons, source=source_kind, reasons=reasons)


async def complete(ctx: Run, messages: list[Message], name: str, max_new_tokens: int) -> str:
    """One reply of the policy outside any sandbox; "" when the prompt does not fit the context."""
    ids = ctx.chat.opening(messages)
    room = ctx.engine.context - len(ids)
    if room < 8:
        return ""
    sampling = Sampling(
        temperature=ctx.config.rsr.guided_temperature, max_new_tokens=min(max_new_tokens, room),
        stop_ids=(ctx.chat.stop_id,), seed=f"{ctx.config.seed}:{name}",
    )  # fmt: skip
    completion = await ctx.engine.generate(ids, sampling, name)
    ctx.engine.release(name)
    return ctx.chat.text_of(completion.ids)


def guided_attempts(ctx: Run, stage: str, runbooks: Sequence[Runbook], tasks: dict[str, Task]) -> list[Attempt]:
    """M executions of every accepted runbook in a new sandbox, under the deployment harness."""
    settings = ctx.config.rsr
    return [
        Attempt(
            f"{r.runbook_id.replace('.plan/', '.guided/')}/{m}", tasks[r.task_id], ctx.deployment_harness,
            settings.guided_temperature, guidance=r.text,
        )
        for r in runbooks
        for m in range(settings.executions)
    ]  # fmt: skip


# ---- samples
def select_samples(
    ctx: Run, successes: Sequence[Trajectory], guided: Sequence[Trajectory], tasks: dict[str, Task], rng: random.Random
) -> list[Trajectory]:
    """Public histories to train on: guided successes and direct successes of the deployment harness, at most so many
    a task.

    The same reply sequence counts once. Wasted or mended steps go last: the cap keeps the shortest trials of a task.
    """
    by_task: dict[str, dict[tuple[str, ...], Trajectory]] = defaultdict(dict)
    direct = [t for t in successes if t.harness == ctx.deployment_harness]
    for trajectory in [*direct, *(t for t in guided if is_clean_success(t, tasks[t.task_id]))]:
        task = tasks[trajectory.task_id]
        sample = public_trajectory(trajectory, task, ctx.chat, ctx.deployment_harness)
        if quotes_runbook(sample, task, ctx.chat, trajectory.guidance):
            continue  # the policy typed its private guidance into a command
        require_public(sample, task, ctx.chat, trajectory.guidance, ctx.deployment_harness)
        by_task[task.task_id].setdefault(tuple(t.command for t in sample.turns), sample)
    samples: list[Trajectory] = []
    for name in sorted(by_task):
        ranked = sorted(by_task[name].values(), key=lambda t: (t.num_action_tokens, t.attempt_id))
        samples += ranked[: ctx.config.rsr.max_samples_per_task]
    rng.shuffle(samples)
    return samples


def report(
    ctx: Run, stage: str, discovered: Sequence[Trajectory], successes: Sequence[Trajectory], runbooks: Sequence[Runbook],
    guided: Sequence[Trajectory], samples: Sequence[Trajectory],
) -> None:  # fmt: skip
    by_harness = Counter(t.harness for t in successes)
    passed = sum(t.verdict.passed for t in guided)
    values = {
        "num_discovered": len(discovered), "num_successes": len(successes), "num_runbooks": len(runbooks),
        "num_guided": len(guided), "guided_passed": passed / max(1, len(guided)), "num_samples": len(samples),
        "num_tasks_solved": len({t.task_id for t in successes}),
        **{f"successes_{name}": n for name, n in sorted(by_harness.items())},
    }  # fmt: skip
    ctx.log.metrics({"kind": "rsr", "stage": stage, **values})
    ctx.log.info(f"{stage}  " + "  ".join(f"{k} {v:.3g}" for k, v in values.items()))


# ---- SFT
def fine_tune(ctx: Run, stage: str, parent: Path, target: Path, samples: Sequence[Trajectory]) -> Path:
    """Supervised fine-tuning of the actor. Loss on action tokens, summed and divided by their global number."""
    if target.exists():
        return target
    settings, world = ctx.config.rsr, ctx.world
    shape, tensors = load_hf_dir(parent)
    with ctx.training():
        policy = Policy(shape, world, OptimizerConfig.of(ctx.config.world, world), megatron=ctx.config.megatron)
        policy.load_hf(tensors)
        sequences = fitting([packing.Sample.of(t) for t in samples], shape.max_position_embeddings, ctx.log)
        steps = sft_steps(sequences, settings.sft_epochs, settings.batch_tokens, f"{ctx.config.seed}:{stage}")

        def rate(step: int) -> float:
            warm = min(1.0, (step + 1) / max(1, settings.sft_warmup_steps))
            return settings.sft_lr * warm * min(1.0, (len(steps) - step) / max(1.0, 0.5 * len(steps)))

        def report(step: int, metrics: dict[str, float]) -> None:
            if step % 10 == 0 or step == len(steps):
                ctx.log.step(stage, step, len(steps), {"loss": metrics["nll"], "grad_norm": metrics["grad_norm"]})

        checkpoints, every = target.with_name("checkpoints"), max(1, len(steps) // settings.sft_epochs)
        supervised.fit(policy, steps.__getitem__, len(steps), rate, checkpoints, every, report)
    export_hf(policy, target, ctx.tokenizer_files)
    supervised.clear(policy, checkpoints)
    return target


def fitting(sequences: Sequence[packing.Sample], limit: int, log: Log) -> list[packing.Sample]:
    """Those of at most ``limit`` tokens; what is left out is said. ValueError when that is all of them."""
    kept = [s for s in sequences if s.num_tokens <= limit]
    if len(kept) < len(sequences):
        log.warning(f"{len(sequences) - len(kept)} of {len(sequences)} samples exceed the model's {limit} positions")
    if sequences and not kept:
        raise ValueError(f"every SFT sample is longer than the model's max_position_embeddings ({limit})")
    return kept


def sft_steps(
    sequences: Sequence[packing.Sample], epochs: int, batch_tokens: int, key: str
) -> list[list[packing.Sample]]:
    """The sequences of each optimizer step, in an order that depends on the seed alone.

    A step holds ``batch_tokens`` tokens at most, or one longer sequence alone: nothing is dropped.
    """
    steps: list[list[packing.Sample]] = []
    for epoch in range(epochs):
        order = list(sequences)
        random.Random(f"{key}:{epoch}").shuffle(order)
        current: list[packing.Sample] = []
        for sequence in order:
            if current and sum(s.num_tokens for s in current) + sequence.num_tokens > batch_tokens:
                steps.append(current)
                current = []
            current.append(sequence)
        if current:
            steps.append(current)
    return steps
