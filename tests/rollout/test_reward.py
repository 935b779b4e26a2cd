"""Success-Prioritized Reward: its order, its bounds, and who gets no reward at all."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rollout_helpers import trajectory

from megatron_rsi.rollout.errors import ErrorKind
from megatron_rsi.rollout.records import Task, Verdict
from megatron_rsi.rollout.reward import SuccessPrioritizedReward

TASK = Task(task_id="t", path="/nowhere", instruction="x", max_turns=10, baseline_fraction=0.25)
unit = st.floats(0.0, 1.0)


@st.composite
def rewards(draw: st.DrawFn) -> SuccessPrioritizedReward:
    alpha, rho, margin = draw(st.floats(0.0, 0.99)), draw(st.floats(0.0, 0.9)), draw(st.floats(1e-3, 1.0))
    assume(alpha + margin <= 1 - rho)
    penalties = st.floats(0.0, 5.0)
    return SuccessPrioritizedReward(
        alpha=alpha, rho=rho, margin=margin,
        kappa=draw(penalties), penalty_timeout=draw(penalties), penalty_budget=draw(penalties)
    )  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    rewards(),
    unit,
    st.floats(0.0, 0.99),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 500),
    st.integers(1, 100),
)
def test_every_success_outranks_every_failure_by_the_margin(
    reward: SuccessPrioritizedReward, fraction: float, baseline: float, late: bool, over: bool,
    tampered: bool, turns: int, budget: int
) -> None:  # fmt: skip
    success = reward.value(passed=True, fraction=1.0, turns=turns, budget=budget)
    failure = reward.value(
        passed=False, fraction=fraction, baseline=baseline, timed_out=late, out_of_budget=over, integrity=tampered
    )
    assert success - failure >= reward.margin - 1e-9
    assert 1 - reward.rho - 1e-9 <= success <= 1
    assert -reward.kappa <= failure <= reward.alpha


@settings(max_examples=100, deadline=None)
@given(rewards(), unit, unit, st.floats(0.0, 0.99))
def test_more_checks_never_score_less(reward: SuccessPrioritizedReward, a: float, b: float, baseline: float) -> None:
    low, high = sorted((a, b))
    assert reward.value(passed=False, fraction=low, baseline=baseline) <= reward.value(
        passed=False, fraction=high, baseline=baseline
    )


def test_numbers_by_hand() -> None:
    reward = SuccessPrioritizedReward(rho=0.2)
    assert reward.value(passed=True, fraction=1.0, turns=5, budget=10) == pytest.approx(0.9)
    assert reward.value(passed=True, fraction=1.0, turns=50, budget=10) == pytest.approx(0.8)
    # f = (0.625 - 0.25) / 0.75 = 0.5
    assert reward.value(passed=False, fraction=0.625, baseline=0.25) == pytest.approx(0.2)
    assert reward.value(passed=False, fraction=0.625, baseline=0.25, timed_out=True) == pytest.approx(0.15)
    assert reward.value(passed=False, fraction=0.25, baseline=0.25) == 0.0, "doing nothing earns nothing"
    assert reward.value(passed=False, fraction=0.0, baseline=0.25) == 0.0, "nor does breaking what held"
    assert reward.value(passed=False, fraction=0.0, timed_out=True, out_of_budget=True) == pytest.approx(-0.1)
    assert reward.value(passed=True, fraction=1.0, integrity=True) == pytest.approx(-0.1)


def test_nine_of_ten_checks_and_every_penalty_avoided_stay_below_a_success() -> None:
    reward = SuccessPrioritizedReward()
    almost, success = reward.value(passed=False, fraction=0.9), reward.value(passed=True, fraction=1.0)
    assert almost == pytest.approx(0.36) and almost + reward.margin <= success


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (dict(alpha=1.0), "alpha must lie in"), (dict(alpha=-0.1), "alpha must lie in"), (dict(margin=0.0), "margin > 0"),
        (dict(kappa=-1.0), "kappa >= 0"), (dict(rho=-0.1), "rho >= 0"), (dict(penalty_timeout=-1.0), "penalties must be >= 0"),
        (dict(alpha=0.8), r"alpha \+ reward.margin = 1.05 must be <= 1 - reward.rho = 1"),
        (dict(rho=0.5), "or a failure could come near a success"), (dict(alpha=float("nan")), "alpha must lie in"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(values: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SuccessPrioritizedReward(**values)


@pytest.mark.parametrize(
    "kind", [k for k in ErrorKind if k.value not in ("agent_timeout", "turn_limit", "context_limit", "repeated")]
)
def test_failures_that_are_not_the_agents_get_no_reward(kind: ErrorKind) -> None:
    reward = SuccessPrioritizedReward()
    assert reward.of(trajectory(verdict=Verdict(error=kind)), TASK) is None
    assert reward.of(trajectory(stop_reason=kind, verdict=Verdict()), TASK) is None


def test_reward_of_a_trajectory() -> None:
    reward = SuccessPrioritizedReward(rho=0.1)
    assert reward.of(trajectory(commands=("a",) * 5), TASK) == pytest.approx(0.95)
    half = Verdict(passed=False, fraction=0.625)
    assert reward.of(trajectory(verdict=half), TASK) == pytest.approx(0.2)
    for stop, expected in (
        (ErrorKind.AGENT_TIMEOUT, 0.15),
        (ErrorKind.TURN_LIMIT, 0.15),
        (ErrorKind.CONTEXT_LIMIT, 0.15),
    ):
        assert reward.of(trajectory(verdict=half, stop_reason=stop), TASK) == pytest.approx(expected)
    assert reward.of(trajectory(verdict=Verdict(integrity=["turn 0: canary seen"])), TASK) == -0.1
    assert reward.of(trajectory(commands=()), TASK) is None, "nothing was sampled, nothing is trained"
