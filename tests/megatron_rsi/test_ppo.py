"""One PPO update, and the stage around it: advantages, calibration gate, KL stop, and what trains."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_helpers import config, head, samples, tensors
from torch import Tensor

from megatron_rsi import ppo
from megatron_rsi.batch import PackedBatch, Sample, make_batch
from megatron_rsi.checkpoint import export_hf, load_hf_dir
from megatron_rsi.critic import inherit
from megatron_rsi.log import Log, read_metrics
from megatron_rsi.parallel import World
from megatron_rsi.phases.rpr import Stage
from megatron_rsi.phases.rpr import run as run_stage
from megatron_rsi.policy import Policy
from megatron_rsi.rollout.errors import ErrorKind
from megatron_rsi.rollout.records import Completion, Task, Trajectory, Turn, Verdict
from megatron_rsi.rollout.reward import SuccessPrioritizedReward
from megatron_rsi.settings import Calibration, Config, Rpr
from megatron_rsi.weights import random_tensors

SETTINGS = Rpr(minibatch_tokens=60)


@pytest.fixture(scope="module")
def world() -> World:
    return World.init(device="cpu")


def constant_critic(world: World, value: float, length: int = 256) -> Policy:
    shape = config(max_position_embeddings=length)
    zeros = {"value_head.weight": torch.zeros(1, shape.hidden_size), "value_head.bias": torch.tensor([value])}
    return inherit(shape, world, dict(random_tensors(shape)) | zeros)


def wild_critic(world: World) -> Policy:
    return inherit(config(), world, dict(random_tensors(config(), seed=1)) | head())


def actor(world: World, seed: int = 0) -> Policy:
    made = Policy(config(), world)
    made.load_hf(dict(random_tensors(config(), seed=seed, std=0.2)))
    return made


def worked_case() -> Sample:
    """method: 4 action, 200 observation, 4 action, 3 observation tokens; reward 1. One prompt token goes before."""
    mask = [False] + [True] * 4 + [False] * 200 + [True] * 4 + [False] * 3
    turns = [0] * 5 + [1] * 207
    return Sample("worked", [1] * 212, mask, turns, [-1.0 if m else 0.0 for m in mask], reward=1.0)


def advantages(experience: ppo.Experience) -> dict[str, Tensor]:
    """By trajectory, at its action tokens."""
    found = {}
    for batch in experience.batches:
        assert batch.advantages is not None
        bounds = batch.cu_seqlens.tolist()
        for name, start, end in zip(batch.sequence_ids, bounds, bounds[1:], strict=False):
            found[name] = batch.advantages[start:end][batch.mask[start:end]]
    return found


# ---- advantages


def test_the_worked_case(world: World) -> None:
    """0.4888, 0.5702, 0.7000: decay passes over the 200 observation tokens. Walking through them gives 0."""
    settings = Rpr(gamma_u=1.0, lambda_u=0.95, gamma_w=1.0, lambda_w=0.95)
    experience = ppo.make_experience([worked_case()], world, settings, 256, "k")
    ppo.score(experience, constant_critic(world, 0.3), settings, settings.lambda_u)
    found = advantages(experience)["worked"]
    assert found[[0, 3, 7]].tolist() == pytest.approx([0.4888, 0.5702, 0.7], abs=5e-5)
    (batch,) = experience.batches
    assert batch.returns is not None and batch.advantages is not None
    assert batch.returns[batch.mask].tolist() == pytest.approx([1.0] * 8), "the critic's target is the whole return"
    assert torch.count_nonzero(batch.advantages[~batch.mask]) == 0


def test_lambda_one_is_return_minus_value(world: World) -> None:
    experience = ppo.make_experience([worked_case()], world, SETTINGS, 256, "k")
    ppo.score(experience, constant_critic(world, 0.3), SETTINGS, 1.0)
    assert advantages(experience)["worked"].tolist() == pytest.approx([0.7] * 8)


def test_the_reward_lies_on_the_last_action_token() -> None:
    batch = make_batch([worked_case(), replace(worked_case(), reward=-0.1)])
    where = batch.rewards.nonzero().squeeze(1).tolist()
    assert where == [208, 212 + 208] and bool(batch.mask[where].all())
    assert batch.rewards[where].tolist() == pytest.approx([1.0, -0.1])


@pytest.mark.parametrize(("key", "size"), [("a", 60), ("b", 60), ("c", 35), ("d", 500)])
def test_advantages_do_not_depend_on_order_or_mini_batches(world: World, key: str, size: int) -> None:
    settings, critic = replace(SETTINGS, minibatch_tokens=size), wild_critic(world)
    alone: dict[str, Tensor] = {}
    for sample in samples():
        single = ppo.make_experience([sample], world, settings, 128, "x")
        ppo.score(single, critic, settings, 0.9)
        alone |= advantages(single)
    experience = ppo.make_experience(samples()[::-1], world, settings, 128, key)
    ppo.score(experience, critic, settings, 0.9, actor(world))
    together = advantages(experience)
    assert together.keys() == alone.keys() and len(together) == 6
    for name, expected in alone.items():
        assert torch.allclose(together[name], expected, atol=1e-5)
        assert len(expected) == sum(samples()[int(name)].mask)
    assert sum(experience.num_tokens) == sum(sum(s.mask) for s in samples())
    assert max(sum(b.num_tokens for b in m) for m in experience.minibatches) <= max(size, 31)


def test_whitening_spans_all_mini_batches(world: World) -> None:
    experience = ppo.make_experience(samples(), world, SETTINGS, 128, "k")
    assert len(experience.minibatches) > 1
    ppo.score(experience, wild_critic(world), SETTINGS, 0.9)
    ppo.whiten(experience, world)
    values = torch.cat(list(advantages(experience).values()))
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(values.var(unbiased=False)) == pytest.approx(1.0, abs=1e-4)


def test_too_long_trajectories_are_counted(world: World) -> None:
    experience = ppo.make_experience(samples(), world, SETTINGS, 20, "k")
    assert experience.num_dropped == 2
    assert {n for b in experience.batches for n in b.sequence_ids} == {"0", "2", "3", "4"}


def test_first_action_tokens() -> None:
    turns = [0, 0, 0, 0, 1, 1, 1, 2]
    mask = [False, True, True, False, False, True, True, True]
    one = Sample("a", list(range(8)), mask, turns, [0.0] * 8)
    two = Sample("b", [1, 2], [False, True], [2, 2], [0.0] * 2)  # the same turn number in the next trajectory
    assert ppo.first_action_tokens(make_batch([one, two])).tolist() == [1, 5, 7, 9]
    assert ppo.first_action_tokens(PackedBatch.empty()).tolist() == []


def test_calibration_reads_first_action_tokens(world: World) -> None:
    experience = ppo.make_experience(samples(), world, SETTINGS, 128, "k")
    ppo.score(experience, constant_critic(world, 0.25, 128), SETTINGS, 0.9)
    report = ppo.calibrate(experience, world)
    assert report is not None and report.num_trials == 6
    num_turns = [len({t for t, m in zip(s.turn_ids, s.mask, strict=True) if m}) for s in samples()]
    rewards = [s.reward for s in samples()]
    assert report.num_pairs == sum(num_turns)
    mean = sum(n * r for n, r in zip(num_turns, rewards, strict=True)) / sum(num_turns)
    assert report.bias == pytest.approx(mean - 0.25) and report.ev == pytest.approx(0.0, abs=1e-6)


def test_a_round_without_any_trial_has_no_calibration(world: World) -> None:
    experience = ppo.make_experience([], world, SETTINGS, 128, "k")
    critic = constant_critic(world, 0.0, 128)
    ppo.score(experience, critic, SETTINGS, 0.9)
    assert ppo.calibrate(experience, world) is None
    assert ppo.fit_critic(experience, critic, SETTINGS, 1e-3, 2, "k") == {}


# ---- updates


def scored(world: World, made: Policy, settings: Rpr = SETTINGS) -> ppo.Experience:
    experience = ppo.make_experience(samples(), world, settings, 128, "k")
    ppo.score(experience, constant_critic(world, 0.5, 128), settings, 0.95, made)
    return experience


def test_fitting_brings_values_to_the_returns(world: World) -> None:
    critic = wild_critic(world)
    experience = ppo.make_experience(samples(), world, SETTINGS, 128, "k")
    settings = replace(SETTINGS, value_clip=10.0)
    ppo.score(experience, critic, settings, 0.95)
    first = ppo.fit_critic(experience, critic, settings, 3e-3, 1, "k")
    last = ppo.fit_critic(experience, critic, settings, 3e-3, 20, "k")
    assert last["value_loss_sum"] < 0.5 * first["value_loss_sum"]
    assert last["num_tokens"] == sum(experience.num_tokens)


def test_an_update_makes_successes_likelier_and_failures_less_likely(world: World) -> None:
    made = actor(world)
    experience = scored(world, made)
    before = [b.old_logprobs for b in experience.batches]
    metrics = ppo.improve_actor(experience, made, SETTINGS, 1e-3, "k")
    gain = {1.0: 0.0, 0.0: 0.0}
    for batch, old, new in zip(experience.batches, before, made.logprobs(experience.batches), strict=True):
        assert isinstance(new, Tensor) and old is not None and batch.returns is not None
        for reward in gain:
            chosen = batch.mask & (batch.returns == reward)
            gain[reward] += float((new - old)[chosen].sum())
    assert gain[1.0] > 0 > gain[0.0]
    assert metrics["ratio_min"] < 1 < metrics["ratio_max"] and metrics["epochs"] == SETTINGS.epochs


def test_a_large_kl_ends_the_epochs(world: World) -> None:
    settings = replace(SETTINGS, epochs=4, kl_stop=1e-4)
    made = actor(world)
    stopped = ppo.improve_actor(scored(world, made), made, settings, 5e-3, "k")
    assert stopped["epochs"] == 1 and stopped["approx_kl_sum"] / stopped["num_tokens"] > 1e-4
    made = actor(world)
    patient = ppo.improve_actor(scored(world, made), made, replace(settings, kl_stop=1e9), 5e-3, "k")
    assert patient["epochs"] == 4


def test_the_first_pass_starts_at_ratio_one(world: World) -> None:
    made = actor(world)
    one = replace(SETTINGS, epochs=1, minibatch_tokens=500)
    metrics = ppo.improve_actor(scored(world, made, one), made, one, 1e-3, "k")
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4) and metrics["ratio_min"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["approx_kl_sum"] == pytest.approx(0.0, abs=1e-5)


def test_the_gap_between_trainer_and_engine(world: World) -> None:
    """Worked case: d = 0.5, -0.5 and 0 at the sampled tokens, and something else where nothing was sampled."""
    batch = make_batch([Sample("a", [1, 2, 3, 4], [False, True, True, True], [0] * 4, [9.0, -1.0, -2.0, -3.0])])
    experience = ppo.Experience([[batch.with_(old_logprobs=torch.tensor([5.0, -0.5, -2.5, -3.0]))]], [3.0], 0)
    gaps = ppo.engine_gap(experience, world)
    assert gaps["engine_gap"] == pytest.approx(1 / 3)
    assert gaps["engine_gap_p99"] == pytest.approx(0.5)
    assert gaps["engine_k3"] == pytest.approx((math.exp(0.5) + math.exp(-0.5) - 2) / 3)
    assert ppo.engine_gap(ppo.Experience([[PackedBatch.empty().with_(old_logprobs=torch.zeros(1))]], [0.0], 0), world) == {}


# ---- the stage: scripted trials, real actor, critic, checkpoints and log

TASKS = [Task(task_id=f"t{n}", path="/nowhere", instruction="x", max_turns=4) for n in range(80)]


class Bench:
    """What a stage needs of a run. Trials come from ``play(label, number)``; their only content is their tokens."""

    def __init__(self, world: World, folder: Path, play: Callable[[str, int], Trajectory], **settings: Any):
        rpr = dict(
            critic_rounds=1, extra_critic_rounds=1, updates=1, trajectories=80, epochs=1, minibatch_tokens=600, critic_lr=1e-2,
            critic_epochs=6, lr=1e-3, warmup_updates=0, value_clip=10.0,
        )  # fmt: skip
        calibration = settings.pop("calibration", {})
        self.config = Config(rpr=Rpr(**{**rpr, **settings}), calibration=Calibration(**calibration))  # type: ignore[arg-type]
        self.world, self.folder, self.play = world, folder, play
        self.log, self.reward = Log(folder), SuccessPrioritizedReward()
        self.tokenizer_files: list[Path] = []
        self.deployment_harness = "general"
        self.num_swaps = 0
        self.labels: list[str] = []

    def training(self) -> Any:
        return self.log.timer("train")

    def hot_swap(self, source: Policy) -> None:
        self.num_swaps += 1

    def draw_tasks(self, key: str, number: int, long_share: float = 0.0) -> list[Task]:
        return TASKS[:number]

    def collect(self, folder: Path, name: str, attempts: Sequence[Any], text: str) -> list[Trajectory]:
        self.labels.append(text)
        return [self.play(a.attempt_id, n) for n, a in enumerate(attempts)]

    def parent(self) -> Path:
        path = self.folder / "parent"
        if not path.exists():
            shape = config()
            made = Policy(shape, self.world)
            made.load_hf(dict(random_tensors(shape, std=0.2)))
            export_hf(made, path)
        return path

    def stage(self) -> Stage:
        return Stage(self, "rpr-1", 0, self.parent(), self.folder / "rpr", None)  # type: ignore[arg-type]

    def warnings(self) -> list[dict[str, Any]]:
        return [r for r in read_metrics(self.folder / "metrics.jsonl") if r["kind"] == "calibration"]


def trial(name: str, number: int, passed: bool, hint: int, **changes: Any) -> Trajectory:
    """Two turns after a prompt that holds ``hint``."""
    turns = [
        Turn(context_ids=[hint, hint, 9 + n],
            completion=Completion(ids=[20, 21, 22], logprobs=[-4.0] * 3, finish="stop", weight_version=1))
        for n in range(2)
    ]  # fmt: skip
    values = dict(verdict=Verdict(passed=passed, fraction=float(passed)), harness="general", turns=turns)
    return Trajectory(attempt_id=name, task_id=TASKS[number].task_id, **{**values, **changes})  # type: ignore[arg-type]


def readable(name: str, number: int) -> Trajectory:
    """The prompt says whether the trial will pass."""
    return trial(name, number, number % 2 == 0, 5 if number % 2 == 0 else 6)


def hopeless(name: str, number: int) -> Trajectory:
    """Chance decides, anew in every round, and no round is like the one before."""
    rng = random.Random(name)
    rate = 0.15 if "critic0" in name or "critic2" in name else 0.85
    return trial(name, number, rng.random() < rate, 7)


def test_a_readable_critic_passes_the_gate_and_the_actor_moves_only_then(world: World, tmp_path: Path) -> None:
    bench = Bench(world, tmp_path, readable, critic_rounds=2, extra_critic_rounds=2)
    stage = bench.stage()
    frozen = stage.actor.weights_hash()
    stage.calibrate_critic()
    progress = stage.progress
    assert progress.calibrated and not progress.refused and progress.head_resets == 0 and progress.lambda_u == 0.95
    assert progress.round in (2, 3) and len(progress.reports) == progress.round
    assert progress.reports[0]["reasons"] and progress.reports[-1]["reasons"] == []
    assert progress.reports[0]["ev"] == pytest.approx(0.0, abs=1e-6), "measured before the first fit: the head is zero"
    assert progress.reports[-1]["ev"] > 0.2 and progress.reports[-1]["num_trials"] == 80
    assert stage.actor.weights_hash() == frozen and bench.num_swaps == 1
    stage.update()
    assert stage.actor.weights_hash() != frozen and bench.num_swaps == 2
    assert bench.labels == [f"rpr-1 critic{n}" for n in range(progress.round)] + ["rpr-1 update0"]


@pytest.mark.parametrize("fallback", ["lambda_one", "refuse"])
def test_a_critic_that_never_calibrates_gets_one_new_head_and_then_the_fallback(
    world: World, tmp_path: Path, fallback: str
) -> None:
    bench = Bench(world, tmp_path, hopeless, calibration={"fallback": fallback}, critic_lr=3e-2)
    stage = bench.stage()
    resets: list[int] = []
    original = stage._critic_round

    def spy() -> None:
        original()
        resets.append(stage.progress.head_resets)

    stage._critic_round = spy  # type: ignore[method-assign]
    stage.calibrate_critic()
    progress = stage.progress
    assert (progress.round, resets) == (3, [0, 1, 1]), "two rounds, a new head, one more"
    assert all(r["reasons"] for r in progress.reports)
    assert progress.calibrated == (fallback == "lambda_one") and progress.refused == (fallback == "refuse")
    assert progress.lambda_u == (1.0 if fallback == "lambda_one" else 0.95)
    first, second = bench.warnings()
    assert not first["refused"] and second["refused"] == (fallback == "refuse") and second["reasons"]


def test_a_refused_stage_returns_the_actor_unchanged(world: World, tmp_path: Path) -> None:
    bench = Bench(world, tmp_path, hopeless, calibration={"fallback": "refuse"}, critic_lr=3e-2)
    target = run_stage(bench, "rpr-1", 0, bench.parent(), tmp_path / "rpr", None)  # type: ignore[arg-type]
    before, after = load_hf_dir(bench.parent())[1], load_hf_dir(target)[1]
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert not any("update" in label for label in bench.labels)
    assert "value_head.weight" in load_hf_dir(tmp_path / "rpr" / "critic")[1]


def test_a_reset_head_starts_again_from_zero(world: World, tmp_path: Path) -> None:
    bench = Bench(world, tmp_path, hopeless)
    stage = bench.stage()
    stage.critic.load_hf(tensors(stage.critic) | head())
    stage._fall_back(["why"])
    batch = make_batch(samples())
    assert torch.count_nonzero(stage.critic.values([batch])[0]) == 0 and stage.progress.head_resets == 1


def test_a_stage_goes_on_after_its_last_checkpoint(world: World, tmp_path: Path) -> None:
    bench = Bench(world, tmp_path, readable, critic_rounds=2, extra_critic_rounds=2, updates=2)
    stage = bench.stage()
    stage.calibrate_critic()
    stage.update()
    again = bench.stage()
    assert again.progress == stage.progress and again.progress.update == 1
    assert again.actor.weights_hash() == stage.actor.weights_hash()
    assert again.critic.weights_hash() == stage.critic.weights_hash()
    stage.update(), again.update()
    assert again.actor.weights_hash() == stage.actor.weights_hash(), "optimizer states came back too"


def test_too_few_trials_do_not_calibrate(world: World, tmp_path: Path) -> None:
    bench = Bench(world, tmp_path, readable, trajectories=20, calibration={"fallback": "refuse"})
    stage = bench.stage()
    stage.calibrate_critic()
    assert stage.progress.refused and all("20 trials, needs 64" in r["reasons"] for r in stage.progress.reports)


def test_rounds_without_a_single_trial_end_in_the_fallback_not_in_a_crash(world: World, tmp_path: Path) -> None:
    def broken(name: str, number: int) -> Trajectory:
        return trial(name, number, False, 7, turns=[], verdict=Verdict(error=ErrorKind.INFRASTRUCTURE))

    bench = Bench(world, tmp_path, broken, calibration={"fallback": "refuse"})
    stage = bench.stage()
    stage.calibrate_critic()
    assert stage.progress.refused and stage.progress.reports[-1]["reasons"] == ["no trial could be scored"]
    frozen = stage.actor.weights_hash()
    stage.update()
    assert stage.actor.weights_hash() == frozen and bench.num_swaps == 1


def test_an_infrastructure_failure_is_masked_out_alone_and_tampering_is_punished(world: World, tmp_path: Path) -> None:
    kinds: dict[int, dict[str, Any]] = {
        1: dict(verdict=Verdict(error=ErrorKind.INFRASTRUCTURE)), 2: dict(verdict=Verdict(error=ErrorKind.VERIFIER_FAILED)),
        3: dict(verdict=Verdict(integrity=["turn 0: canary seen"])),
        4: dict(stop_reason=ErrorKind.TURN_LIMIT, verdict=Verdict()),
        5: dict(verdict=Verdict(error=ErrorKind.ENGINE)),
    }  # fmt: skip
    bench = Bench(world, tmp_path, lambda name, n: trial(f"{n}", n, True, 5, **kinds.get(n, {})), trajectories=7)
    stage = bench.stage()
    trajectories, found = stage.collect("update0")
    assert len(trajectories) == 7
    assert {s.sequence_id: s.reward for s in found} == pytest.approx({"0": 1.0, "3": -0.1, "4": -0.05, "6": 1.0})
    (record,) = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "consumed"]
    assert record["ids"] == ["0", "3", "4", "6"]
    together = ppo.make_experience(found, world, SETTINGS, 128, "k")
    ppo.score(together, wild_critic(world), SETTINGS, 0.9)
    without = ppo.make_experience([s for s in found if s.sequence_id != "3"], world, SETTINGS, 128, "k")
    ppo.score(without, wild_critic(world), SETTINGS, 0.9)
    a, b = advantages(together), advantages(without)
    assert all(torch.allclose(a[n], b[n], atol=1e-5) for n in b)


def test_a_critic_worse_than_a_constant_holds_the_actor_after_three_updates(world: World, tmp_path: Path) -> None:
    bench = Bench(world, tmp_path, readable, updates=5, ev_alarm_steps=3, critic_lr=1e-9)
    stage = bench.stage()
    quiet, loud = tensors(stage.critic), {name: 30 * tensor for name, tensor in head(seed=1).items()}
    stage.critic.load_hf(quiet | loud)
    hashes = [stage.actor.weights_hash()]
    for _ in range(4):
        stage.update()
        hashes.append(stage.actor.weights_hash())
    assert stage.progress.num_bad_ev == 4
    assert len(set(hashes[:3])) == 3 and hashes[2] == hashes[3] == hashes[4]
    stage.critic.load_hf(quiet)  # values of 0: no better than a constant, and no worse
    stage.update()
    assert stage.progress.num_bad_ev == 0 and stage.actor.weights_hash() != hashes[4]
