"""Supervised training goes on from its last checkpoint to the same weights, and no sample is lost on the way in."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path

import pytest
from policy_helpers import OPTIMIZER, config, sample
from rich.console import Console

from megatron_rsi import supervised
from megatron_rsi.batch import Sample
from megatron_rsi.log import Log
from megatron_rsi.parallel import World
from megatron_rsi.phases.rsr import fitting, sft_steps
from megatron_rsi.policy import OptimizerConfig, Policy
from megatron_rsi.weights import random_tensors

NUM_STEPS = 7


class Killed(RuntimeError):
    pass


@pytest.fixture(scope="module")
def world() -> World:
    return World.init(device="cpu")


def fit(world: World, folder: Path, optimizer: OptimizerConfig, dies_after: int = NUM_STEPS) -> tuple[Policy, list[int]]:
    policy, seen = Policy(config(), world, optimizer), []
    policy.load_hf(random_tensors(config(), seed=2, std=0.1))

    def report(step: int, metrics: dict[str, float]) -> None:
        seen.append(step)
        if step > dies_after:
            raise Killed

    def draw(step: int) -> list[Sample]:
        return [sample(step, 12), sample(step + 100, 5)]

    with suppress(Killed):
        supervised.fit(policy, draw, NUM_STEPS, lambda step: 0.1 / (step + 1), folder, 2, report)
    return policy, seen


@pytest.mark.parametrize("optimizer", [OPTIMIZER, OptimizerConfig(kind="muon")], ids=["adamw", "muon"])
def test_a_killed_training_ends_with_the_same_weights(world: World, tmp_path: Path, optimizer: OptimizerConfig) -> None:
    whole, seen = fit(world, tmp_path / "whole", optimizer)
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    assert fit(world, tmp_path / "cut", optimizer, dies_after=4)[1] == [1, 2, 3, 4, 5]
    resumed, seen = fit(world, tmp_path / "cut", optimizer)
    assert seen == [5, 6, 7], "steps 1 to 4 are in the checkpoint, the fifth was lost"
    assert resumed.weights_hash() == whole.weights_hash()
    assert [p.name for p in (tmp_path / "cut").iterdir()] == ["step_00000006"], "one checkpoint is kept"
    supervised.clear(resumed, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


def test_long_samples_train_alone_and_only_those_beyond_the_model_are_left_out() -> None:
    out = io.StringIO()
    log = Log(None, 0, Console(file=out, width=200))
    sequences = [sample(n, length) for n, length in enumerate((10, 50, 20, 15, 90))]
    kept = fitting(sequences, 60, log)
    assert [s.num_tokens for s in kept] == [10, 50, 20, 15]
    assert "1 of 5 samples exceed the model's 60 positions" in out.getvalue()
    steps = sft_steps(kept, 2, 30, "key")
    assert sorted(s.num_tokens for step in steps for s in step) == sorted(2 * [10, 50, 20, 15])
    assert all(len(step) == 1 or sum(s.num_tokens for s in step) <= 30 for step in steps)
    with pytest.raises(ValueError, match="every SFT sample is longer"):
        fitting(sequences, 5, log)
    assert fitting([], 5, log) == []
