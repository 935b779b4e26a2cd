"""Calibration numbers by hand, the gate's reasons, and the re-initialised head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from policy_helpers import batch_of, config, head, tensors

from megatron_rsi.critic import Thresholds, calibration, gate, inherit, reset_value_head
from megatron_rsi.parallel import World
from megatron_rsi.weights import random_tensors


def test_numbers_by_hand() -> None:
    report = calibration(torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.tensor([0.1, 0.9, 0.7, 0.3]), num_bins=2)
    # errors -0.1 0.1 0.3 -0.3: mean 0, mean square 0.05; Var[R] = 0.25
    assert report.variance == pytest.approx(0.25) and report.bias == pytest.approx(0.0, abs=1e-7)
    assert report.ev == pytest.approx(0.8) and report.r2 == pytest.approx(0.8)
    assert report.rmse == pytest.approx(0.05**0.5)
    # bins by value: (0.1, 0.3 | returns 0, 0) and (0.7, 0.9 | 1, 1): both 0.2 off
    assert report.ece == pytest.approx(0.2)
    assert (report.num_trials, report.num_pairs) == (4, 4)


def test_explained_variance_is_blind_to_an_offset_and_the_gate_is_not() -> None:
    generator = np.random.default_rng(0)
    chance = generator.uniform(0, 1, 2000)
    returns = (generator.uniform(0, 1, 2000) < chance).astype(float)
    good, shifted = calibration(returns, chance), calibration(returns, chance + 0.3)
    assert good.ev == pytest.approx(shifted.ev) and good.ev > 0.25
    assert gate(good).passed and gate(good).reasons == ()
    assert shifted.bias == pytest.approx(good.bias - 0.3)
    verdict = gate(shifted)
    assert not verdict.passed and any(r == "|bias| 0.295 above 0.05" for r in verdict.reasons)
    assert any(r == "ece 0.295 above 0.1" for r in verdict.reasons)


def test_bins_have_equal_mass_and_ties_do_not_depend_on_order() -> None:
    returns = np.concatenate([np.ones(50), np.zeros(50)])
    constant = calibration(returns, np.full(100, 0.5))
    assert constant.ece == pytest.approx(0.0, abs=1e-9) and constant.ev == pytest.approx(0.0)
    assert calibration(returns[::-1].copy(), np.full(100, 0.5)).ece == pytest.approx(constant.ece, abs=1e-12)
    # equal mass, not equal width: 90 pairs at 0.01, 10 at 0.99 that are wrong by 0.99 -> one bin of ten
    values = np.concatenate([np.full(90, 0.01), np.full(10, 0.99)])
    assert calibration(np.full(100, 0.0), values).ece == pytest.approx(0.9 * 0.01 + 0.1 * 0.99)


def test_returns_that_hardly_vary_are_judged_by_rmse() -> None:
    returns = np.full(100, 0.4)
    near, far = calibration(returns, returns + 0.05), calibration(returns, returns + 0.2)
    assert near.ev is None and near.r2 is None
    assert gate(near).passed
    assert gate(far).reasons == ("rmse 0.200 above 0.1 (returns hardly vary)",)


def test_too_few_trials_and_own_thresholds() -> None:
    returns, values = np.array([0.0, 1.0] * 40), np.array([0.1, 0.9] * 40)
    assert gate(calibration(returns, values)).passed
    assert gate(calibration(returns, values, num_trials=20)).reasons == ("20 trials, needs 64",)
    assert gate(calibration(returns, values), Thresholds(ece=0.05)).reasons == ("ece 0.100 above 0.05",)
    noisy = gate(calibration(returns, 1 - values))
    assert [r.split()[0] for r in noisy.reasons] == ["ev", "r2", "ece"]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="as many returns as values"):
        calibration([0.0, 1.0], [0.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        calibration(np.zeros(0), np.zeros(0))
    with pytest.raises(ValueError, match="finite"):
        calibration(np.array([np.nan]), np.zeros(1))


def test_resetting_the_head_leaves_the_body() -> None:
    world = World.init(device="cpu")
    critic = inherit(config(), world, dict(random_tensors(config(), seed=1)) | head())
    before, batch = tensors(critic), batch_of([0, 1])
    assert critic.values([batch])[0].abs().max() > 0
    reset_value_head(critic)
    after = tensors(critic)
    assert torch.count_nonzero(critic.values([batch])[0]) == 0
    assert all(torch.equal(before[n], after[n]) for n in before if not n.startswith("value_head"))
