import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, permutation_test

from megatron_rsi import gate
from megatron_rsi.gate import decide, p_worse, wilson


def outcomes(successes: int, n: int, offset: int = 0) -> dict[str, float]:
    return {f"t{i}": float((i + offset) % n < successes) for i in range(n)}


def test_wilson_equals_its_formula() -> None:
    z = 1.959963984540054
    for k, n in [(0, 10), (5, 10), (69, 256), (100, 100), (1, 1)]:
        p = k / n
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        assert wilson(k, n) == pytest.approx((max(0.0, centre - half), min(1.0, centre + half)), abs=1e-9)
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)


def test_p_is_mcnemars_exact_test_for_single_attempts() -> None:
    for worse, better in [(8, 2), (5, 5), (0, 6), (7, 0), (1, 0), (30, 12), (70, 90)]:
        expected = binomtest(better, worse + better, alternative="less").pvalue
        assert p_worse([-1.0] * worse + [1.0] * better + [0.0] * 50) == pytest.approx(expected, abs=1e-9)
    assert p_worse([0.0] * 20) == 1.0 and p_worse([]) == 1.0


def test_p_of_averaged_attempts_by_hand() -> None:
    """Differences -1, -0.5: sums over signs are -1.5, -0.5, 0.5, 1.5, one of four is <= -1.5."""
    assert p_worse([-1.0, -0.5]) == pytest.approx(0.25)
    assert p_worse([-1.0, 0.5]) == pytest.approx(0.5)
    assert p_worse([-1 / 3, -1 / 3, 0.5]) == pytest.approx(0.5)  # of -7, -3, -3, 1, -1, 3, 3, 7 sixths: four <= -1


def test_p_equals_scipys_permutation_test() -> None:
    draw = random.Random(3)
    differences = np.array([draw.choice([-1.0, -0.5, -1 / 3, 0.5, 0.75]) for _ in range(12)])
    exact = permutation_test(
        (differences,), lambda x, axis: np.sum(x, axis=axis), permutation_type="samples", alternative="less",
        n_resamples=5000, vectorized=True,
    )  # fmt: skip
    assert p_worse(list(differences)) == pytest.approx(exact.pvalue, abs=1e-9)


def test_a_stage_is_compared_with_every_adopted_stage_before_it() -> None:
    """Two losses of 12 points, each within noise, are 24 points together: the second is rolled back against the base."""
    base, first, second = (outcomes(k, 128) for k in (64, 54, 44))
    shares = 0.0125
    once = gate.decide_stage({"base": base}, first, shares, min_tasks=64, stage="rsr-1")
    assert not once.adopted, "nested outcomes: ten of ten tasks are worse"
    noisy = {f"t{i}": float(i < 34 or 54 <= i < 74) for i in range(128)}  # 20 worse and 10 better than first
    assert gate.decide_stage({"first": first}, noisy, shares, min_tasks=64, stage="s").adopted
    both = gate.decide_stage({"base": base, "first": first}, noisy, shares, min_tasks=64, stage="s")
    assert both.adopted and both.against == "first" and both.alpha_share == shares / 2 and "against first" in both.reason
    lost = gate.decide_stage({"base": base, "noisy": noisy}, second, shares, min_tasks=64, stage="s")
    assert not lost.adopted and lost.against == "base" and lost.reason.startswith("rolled back")
    few = gate.decide_stage({"base": base}, {"t1": 1.0}, shares, min_tasks=64, stage="s")
    assert not few.adopted and few.num_tasks == 1, "only tasks with a verdict on both sides are compared"
    with pytest.raises(ValueError, match="at least one earlier stage"):
        gate.decide_stage({}, second, shares, min_tasks=64, stage="s")


def test_a_clear_gain_is_adopted_and_a_clear_loss_rolled_back() -> None:
    low, high = outcomes(30, 128), outcomes(60, 128)
    up, down = decide(low, high, 0.0125, stage="rsr-1"), decide(high, low, 0.0125)
    assert up.adopted and up.reason.startswith("adopted: +23.4 points")
    assert (up.before, up.after, up.num_better, up.num_worse, up.stage) == (30 / 128, 60 / 128, 30, 0, "rsr-1")
    assert not down.adopted and down.reason.startswith("rolled back: worse by more than noise")
    assert down.difference == -up.difference == pytest.approx(-30 / 128)


def test_a_small_loss_is_noise_and_said_so() -> None:
    decision = decide(outcomes(60, 128), outcomes(58, 128, offset=3), 0.0125)
    assert decision.difference < 0 and decision.adopted
    assert "within noise" in decision.reason and -decision.difference < decision.margin


def test_equal_models_are_adopted() -> None:
    decision = decide(outcomes(40, 100), outcomes(40, 100), 0.0125)
    assert decision.adopted and decision.p_worse == 1.0 and decision.margin == 0.0


def test_too_few_tasks_roll_back() -> None:
    decision = decide(outcomes(1, 10), outcomes(9, 10), 0.0125, min_tasks=64)
    assert not decision.adopted and "only 10 tasks" in decision.reason and "64" in decision.reason


def test_nothing_measured_is_not_adopted() -> None:
    assert not decide({}, {}, 0.0125).adopted


def test_over_a_run_a_harmless_stage_is_lost_to_noise_with_at_most_alpha() -> None:
    """Two attempts a task by models of equal skill; 300 runs of four stages."""
    draw, lost = random.Random(0), 0
    for _ in range(300):
        skill = [draw.random() for _ in range(64)]
        sample = lambda: {str(i): ((draw.random() < p) + (draw.random() < p)) / 2 for i, p in enumerate(skill)}  # noqa: E731,B023
        lost += any(not decide(sample(), sample(), 0.05 / 4).adopted for _ in range(4))
    assert lost / 300 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_a_loss_beyond_the_margin_is_found() -> None:
    """A stage 20 points worse on 128 tasks, two attempts each, is rolled back nearly always."""
    draw, kept = random.Random(1), 0
    for _ in range(50):
        sample = lambda p: {str(i): ((draw.random() < p) + (draw.random() < p)) / 2 for i in range(128)}  # noqa: E731
        kept += decide(sample(0.6), sample(0.4), 0.0125).adopted
    assert kept <= 3


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"1 only before \['a'\], 1 only after \['b'\]"):
        decide({"a": 1.0}, {"b": 1.0}, 0.01)
    with pytest.raises(ValueError, match=r"success after of task 'a' must lie in \[0, 1\], got nan"):
        decide({"a": 1.0}, {"a": float("nan")}, 0.01)
    with pytest.raises(ValueError, match="alpha_share"):
        decide({"a": 1.0}, {"a": 1.0}, 0.5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12))
def test_the_decision_is_a_function_of_the_outcomes_and_never_rejects_a_gain(pairs: list[tuple[float, float]]) -> None:
    before = {str(i): b for i, (b, _) in enumerate(pairs)}
    after = {str(i): a for i, (_, a) in enumerate(pairs)}
    shuffled = dict(reversed(after.items()))
    decision = decide(before, after, 0.0125)
    assert decision == decide(before, shuffled, 0.0125)
    if decision.difference >= 0:
        assert decision.adopted


def test_the_decision_is_a_file(tmp_path: Path) -> None:
    decision = decide(outcomes(3, 20), outcomes(9, 20), 0.0125, stage="rpr-1")
    gate.save(decision, tmp_path / "gate.json")
    assert gate.load(tmp_path / "gate.json") == decision
    with pytest.raises(ValueError, match="no gate decision"):
        gate.load(tmp_path / "other.json")
    (tmp_path / "bad.json").write_text('{"stage": 3}')
    with pytest.raises(ValueError, match="not a gate decision"):
        gate.load(tmp_path / "bad.json")
