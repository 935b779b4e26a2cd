"""RPR, recursive policy-refine: PPO with an inherited critic that is recalibrated before the actor may move.

inherit critic -> critic-only rounds with the calibration gate -> repeat: collect -> old log-probs -> values -> TB-GAE ->
critic and actor epochs -> hot swap. A checkpoint closes every round and update; a crash goes back to the last one and
keeps the attempts already made after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .. import batch as packing
from .. import checkpoint, ppo
from ..critic import Thresholds, build_critic, gate, inherit, reset_value_head
from ..policy import OptimizerConfig, Policy
from ..rollout.collect import Attempt
from ..rollout.records import Task, Trajectory
from ..run import Run
from ..settings import by_cycle


@dataclass
class Progress:
    """Where the stage stands; part of every checkpoint. ``lambda_u`` becomes 1 when calibration never passes."""

    round: int = 0  # critic-only rounds done
    update: int = 0  # actor updates done
    calibrated: bool = False
    refused: bool = False
    head_resets: int = 0
    lambda_u: float = 0.95
    num_bad_ev: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)


def run(ctx: Run, name: str, cycle: int, parent: Path, folder: Path, inherited: Path | None) -> Path:
    """One RPR stage, ``rpr-1`` say, from the checkpoint ``parent``; ``inherited`` is the critic of the RPR stage
    before, if any.

    Returns the new actor's checkpoint; the critic is exported beside it as ``critic``.
    """
    target = folder / "actor"
    if target.exists():
        return target
    stage = Stage(ctx, name, cycle, parent, folder, inherited)
    stage.calibrate_critic()
    while stage.progress.update < ctx.config.rpr.updates and not stage.progress.refused:
        stage.update()
    checkpoint.export_hf(stage.critic, folder / "critic", ctx.tokenizer_files)
    return checkpoint.export_hf(stage.actor, target, ctx.tokenizer_files)


class Stage:
    """Actor, critic and progress of one RPR stage."""

    def __init__(self, ctx: Run, name: str, cycle: int, parent: Path, folder: Path, inherited: Path | None):
        self.ctx, self.settings, self.folder = ctx, ctx.config.rpr, folder
        self.cycle, self.name = cycle, name
        shape, tensors = checkpoint.load_hf_dir(parent)
        self.max_length = shape.max_position_embeddings
        optimizer = OptimizerConfig.of(ctx.config.world, ctx.world, clip_grad=self.settings.max_grad_norm)
        self.actor = Policy(shape, ctx.world, optimizer, megatron=ctx.config.megatron)
        self.actor.load_hf(tensors)
        if inherited is not None:
            self.critic = inherit(shape, ctx.world, checkpoint.load_hf_dir(inherited)[1], optimizer, ctx.config.megatron)
        else:
            self.critic = build_critic(shape, ctx.world, tensors, optimizer, ctx.config.megatron)
        self.progress = Progress(lambda_u=self.settings.lambda_u)
        self._resume()
        ctx.hot_swap(self.actor)

    # ---- checkpoints
    def _resume(self) -> None:
        path = checkpoint.latest(self.folder / "checkpoints")
        if path is None:
            return
        state = checkpoint.load(path, self.ctx.world)
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        self.progress = Progress(**state["progress"])
        self.ctx.log.info(f"{self.name}: resumed after round {self.progress.round}, update {self.progress.update}")

    def _save(self) -> None:
        state = {
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "progress": asdict(self.progress),
        }
        with self.ctx.log.timer("sync"):
            checkpoint.save(
                self.folder / "checkpoints", self.ctx.world, self.progress.round + self.progress.update, state
            )

    # ---- rollouts
    def collect(self, label: str) -> tuple[list[Trajectory], list[packing.Sample]]:
        """One round of trials of the current actor, and what of it may train."""
        settings = self.settings
        tasks = self.ctx.draw_tasks(f"{self.name}.{label}", settings.trajectories, by_cycle(settings.long_share, self.cycle))
        attempts = [
            Attempt(f"{self.name}.{label}/{task.task_id}/{n}", task, self.ctx.deployment_harness, settings.temperature)
            for n, task in enumerate(tasks)
        ]
        trajectories = self.ctx.collect(self.folder, f"rollouts.{label}", attempts, f"{self.name} {label}")
        samples = self._samples(trajectories, tasks)
        ids = [s.sequence_id for s in samples]
        self.ctx.log.metrics({"kind": "consumed", "stage": self.name, "step": label, "ids": ids})
        return trajectories, samples

    def _samples(self, trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> list[packing.Sample]:
        samples = []
        for trajectory, task in zip(trajectories, tasks, strict=True):
            reward = self.ctx.reward.of(trajectory, task)
            if reward is not None:
                samples.append(packing.Sample.of(trajectory, reward))
        return samples

    # ---- critic
    def calibrate_critic(self) -> None:
        """Critic-only rounds on fresh trials until the gate passes; the actor must not move meanwhile."""
        frozen = self.actor.weights_hash()
        while not self.progress.calibrated and not self.progress.refused:
            self._critic_round()
        assert self.actor.weights_hash() == frozen, "the actor moved in a critic-only round"

    def _critic_round(self) -> None:
        settings, progress, number = self.settings, self.progress, self.progress.round
        trajectories, samples = self.collect(f"critic{number}")
        with self.ctx.training():
            key = f"{self.ctx.config.seed}:{self.name}:critic{number}"
            experience = ppo.make_experience(samples, self.ctx.world, settings, self.max_length, key)
            ppo.score(experience, self.critic, settings, progress.lambda_u)
            resets = progress.head_resets
            self._judge(experience)
            if progress.head_resets > resets:  # the old head's values must not clip the new one's
                ppo.score(experience, self.critic, settings, progress.lambda_u)
            ppo.fit_critic(experience, self.critic, settings, settings.critic_lr, settings.critic_epochs, key)
        progress.round += 1
        planned = max(number + 1, settings.critic_rounds)
        self._log(number + 1, planned, trajectories, samples, {"ev": progress.reports[-1].get("ev")}, "critic")
        self._save()

    def _judge(self, experience: ppo.Experience) -> None:
        """The gate, on this round's data before it is fitted.

        First chance after ``critic_rounds``, then ``extra_critic_rounds`` more; then a new value head, which gets
        ``critic_rounds`` and one chance; then the fall-back.
        """
        settings, progress = self.settings, self.progress
        report = ppo.calibrate(experience, self.ctx.world)
        record: dict[str, Any] = msgspec.to_builtins(report) if report is not None else {"num_trials": 0}
        limits = {k: v for k, v in asdict(self.ctx.config.calibration).items() if k != "fallback"}
        result = gate(report, Thresholds(**limits)) if report is not None else None
        record["reasons"] = list(result.reasons) if result else ["no trial could be scored"]
        progress.reports.append(record)
        chances = settings.extra_critic_rounds if progress.head_resets == 0 else 0
        first_verdict = settings.critic_rounds + progress.head_resets * (settings.critic_rounds + settings.extra_critic_rounds)
        if progress.round + 1 < first_verdict:
            return
        if result is not None and result.passed:
            progress.calibrated = True
            self.ctx.log.info(f"{self.name}: critic calibrated after {progress.round + 1} rounds")
        elif progress.round + 1 >= first_verdict + chances:
            self._fall_back(record["reasons"])

    def _fall_back(self, reasons: list[str]) -> None:
        progress = self.progress
        if progress.head_resets == 0:
            progress.head_resets = 1
            reset_value_head(self.critic)
            self.ctx.log.warning(f"{self.name}: critic not calibrated ({'; '.join(reasons)}); new value head")
        elif self.ctx.config.calibration.fallback == "lambda_one":
            progress.calibrated, progress.lambda_u = True, 1.0
            self.ctx.log.warning(
                f"{self.name}: critic not calibrated ({'; '.join(reasons)}); going on with lambda_u = 1"
            )
        else:
            progress.refused = True
            self.ctx.log.warning(
                f"{self.name}: refused, critic not calibrated ({'; '.join(reasons)}); the actor stays as it is"
            )
        self.ctx.log.metrics(
            {"kind": "calibration", "stage": self.name, "reasons": reasons, "refused": progress.refused}
        )

    # ---- PPO
    def update(self) -> None:
        """Collect, score, train both, put the new weights into the engine, checkpoint."""
        settings, progress, number = self.settings, self.progress, self.progress.update
        trajectories, samples = self.collect(f"update{number}")
        values: dict[str, float | None] = {}
        if samples:
            with self.ctx.training():
                values = self._train(samples, f"{self.ctx.config.seed}:{self.name}:update{number}")
            self.ctx.hot_swap(self.actor)
        else:
            self.ctx.log.warning(f"{self.name}: update {number} got no trial that may train; nothing changes")
        progress.update += 1
        self._log(progress.update, settings.updates, trajectories, samples, values, "update")
        self._save()

    def _train(self, samples: Sequence[packing.Sample], key: str) -> dict[str, float | None]:
        settings, progress = self.settings, self.progress
        experience = ppo.make_experience(samples, self.ctx.world, settings, self.max_length, key)
        ppo.score(experience, self.critic, settings, progress.lambda_u, self.actor)
        gaps = ppo.engine_gap(experience, self.ctx.world)
        report = ppo.calibrate(experience, self.ctx.world)
        ev = report.ev if report is not None else None
        progress.num_bad_ev = progress.num_bad_ev + 1 if ev is not None and ev < 0 else 0
        if settings.whiten:
            ppo.whiten(experience, self.ctx.world)
        critic = ppo.fit_critic(experience, self.critic, settings, settings.critic_lr, settings.critic_epochs, key)
        values: dict[str, float | None] = {"ev": ev, "value_loss": critic["value_loss_sum"] / critic["num_tokens"], **gaps}
        if progress.num_bad_ev >= settings.ev_alarm_steps:
            self.ctx.log.warning(
                f"{self.name}: explained variance below 0 for {progress.num_bad_ev} updates; actor held"
            )
            return values
        lr = settings.lr * min(1.0, (progress.update + 1) / max(1, settings.warmup_updates))
        actor = ppo.improve_actor(experience, self.actor, settings, lr, key)
        tokens = actor["num_tokens"]
        return values | {
            "kl": actor["approx_kl_sum"] / tokens, "clip": actor["clip_count"] / tokens, "ratio_max": actor["ratio_max"],
            "ratio_min": actor["ratio_min"], "grad_norm": actor["grad_norm"], "epochs": actor["epochs"],
            "engine_gap_max": actor["engine_gap_max"], "lr": lr,
            "num_dropped": float(experience.num_dropped),
        }  # fmt: skip

    def _log(
        self, step: int, total: int, trajectories: Sequence[Trajectory], samples: Sequence[packing.Sample],
        values: dict[str, float | None], kind: str,
    ) -> None:  # fmt: skip
        graded = [t for t in trajectories if t.verdict.error is None]
        count = max(1, len(graded))
        common: dict[str, float | None] = {
            "reward": sum(s.reward for s in samples) / max(1, len(samples)),
            "solved": sum(t.verdict.passed for t in graded) / count,
            "partial": sum(t.verdict.fraction for t in graded) / count,
            "turns": sum(len(t.turns) for t in graded) / count,
            "num_invalid": len(trajectories) - len(samples),
            "num_integrity": sum(bool(t.verdict.integrity) for t in trajectories),
        }
        stage = self.name if kind == "update" else f"{self.name}.critic"
        self.ctx.log.step(stage, step, total, common | values)
