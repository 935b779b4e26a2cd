"""Adoption gate: may the stage that just ended replace the one before it?

Both models attempt the same validation tasks. Per task i, b_i and a_i are the mean strict success before and after, and
d_i = a_i - b_i. Under the null hypothesis "the stage did no harm" each d_i is as likely to be -d_i, so

    p = P( sum_i s_i d_i <= sum_i d_i ),   s_i = +-1 independently       (one-sided paired sign-flip test)

For single attempts (d_i in {-1, 0, 1}) and no ties this is McNemar's exact test.

**Rule.** A stage is compared with every adopted stage before it, not only with the one that it started from: small losses,
each within noise, must not add up. It is rolled back iff one of these p is <= alpha / (number of stages x number of its
comparisons), else adopted. So over the whole run a harmless stage is lost to noise with probability <= alpha (Bonferroni).
The drop that noise of this size can hide, ``margin``, stands in the decision beside the verdict; ``gate.samples`` and
``tasks.num_validation`` make it smaller. Too few tasks to tell is a roll-back as well: unmeasured is not adopted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist

import msgspec

from .config import write_atomic


class GateDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision and what it rests on; stored as gate.json. All rates are strict success in [0, 1]."""

    stage: str
    against: str = ""  # the earlier stage of this comparison
    adopted: bool
    reason: str
    num_tasks: int
    before: float
    after: float
    difference: float
    ci95: tuple[float, float]  # of the difference
    num_better: int  # tasks that improved
    num_worse: int
    p_worse: float
    alpha_share: float
    margin: float  # a drop up to about this size passes as noise


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of a success rate; (0, 1) when nothing was measured.

    >>> tuple(round(x, 4) for x in wilson(5, 10))
    (0.2366, 0.7634)
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie in [0, n], got {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    from scipy.stats import binomtest  # a second to import: only where it is used

    interval = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def p_worse(differences: Sequence[float]) -> float:
    """One-sided p of the sign-flip test above; small when the differences lie below 0. 1 when none differs from 0.

    Exact: rates are counts over a few attempts, so on the grid of their common denominator the distribution of the sum
    is built by one convolution a task (scipy's permutation_test would sample it).
    """
    fractions = [Fraction(d).limit_denominator(1000) for d in differences]
    grid = math.lcm(*(f.denominator for f in fractions))
    steps = [abs(int(f * grid)) for f in fractions if f != 0]
    import numpy as np

    chance = np.ones(1)  # of the sums -total ... total
    for step in steps:
        grown = np.zeros(len(chance) + 2 * step)
        grown[: len(chance)] += 0.5 * chance
        grown[2 * step :] += 0.5 * chance
        chance = grown
    observed = int(sum(fractions) * grid) + sum(steps)
    return min(1.0, float(chance[: observed + 1].sum()))


def _check_outcomes(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    only_before, only_after = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    if only_before or only_after:
        raise ValueError(
            "the gate compares the same tasks before and after: "
            f"{len(only_before)} only before {only_before[:3]}, {len(only_after)} only after {only_after[:3]}"
        )
    for name, outcomes in (("before", before), ("after", after)):
        for task, rate in outcomes.items():
            if not 0.0 <= rate <= 1.0:
                raise ValueError(f"success {name} of task {task!r} must lie in [0, 1], got {rate}")


def decide(
    before: Mapping[str, float],
    after: Mapping[str, float],
    alpha_share: float,
    *,
    min_tasks: int = 1,
    stage: str = "",
    against: str = "",
) -> GateDecision:
    """Applies the rule to task id -> mean strict success over the attempts of that task that have a valid verdict.

    A task with no valid attempt on one side (infrastructure failure) must be left out of both. Raises ValueError when
    the task sets differ, a rate leaves [0, 1] or ``alpha_share`` leaves (0, 0.5).
    """
    if not 0.0 < alpha_share < 0.5:
        raise ValueError(f"alpha_share must lie in (0, 0.5), got {alpha_share}")
    _check_outcomes(before, after)
    tasks = sorted(before)
    differences = [after[t] - before[t] for t in tasks]
    num = len(tasks)
    mean = sum(differences) / num if num else 0.0
    error = _standard_error(differences)
    p = p_worse(differences)
    enough = num >= max(1, min_tasks)
    adopted = enough and p > alpha_share
    return GateDecision(
        stage=stage,
        against=against,
        adopted=adopted,
        reason=_reason(adopted, enough, num, min_tasks, mean, p, alpha_share, against),
        num_tasks=num,
        before=sum(before.values()) / num if num else 0.0,
        after=sum(after.values()) / num if num else 0.0,
        difference=mean,
        ci95=(mean - 1.96 * error, mean + 1.96 * error),
        num_better=sum(d > 0 for d in differences),
        num_worse=sum(d < 0 for d in differences),
        p_worse=p,
        alpha_share=alpha_share,
        margin=NormalDist().inv_cdf(1.0 - alpha_share) * error,
    )


def decide_stage(
    earlier: Mapping[str, Mapping[str, float]], after: Mapping[str, float], alpha_share: float, *, min_tasks: int, stage: str
) -> GateDecision:
    """The rule for a stage: ``earlier`` holds the rates of every adopted stage before it, its parent last.

    Only tasks with a verdict on both sides are compared. Returns the comparison that rolls the stage back, else the one
    with its parent. Raises ValueError when there is no earlier stage.
    """
    if not earlier:
        raise ValueError("the gate needs at least one earlier stage, the base")
    decisions = []
    for name, before in earlier.items():
        common = before.keys() & after.keys()
        decisions.append(
            decide(
                {task: before[task] for task in common}, {task: after[task] for task in common},
                alpha_share / len(earlier), min_tasks=min_tasks, stage=stage, against=name,
            )
        )  # fmt: skip
    return ([d for d in decisions if not d.adopted] or decisions)[-1]


def _standard_error(differences: list[float]) -> float:
    """Of the mean of the paired differences; 0 for fewer than two."""
    n = len(differences)
    if n < 2:
        return 0.0
    mean = sum(differences) / n
    return math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)


def _reason(
    adopted: bool, enough: bool, num: int, min_tasks: int, mean: float, p: float, alpha_share: float, against: str
) -> str:
    change = f"{100 * mean:+.1f} points" + (f" against {against}" if against else "")
    change += f" on {num} paired tasks (p of no harm {p:.3g}, alpha {alpha_share:.3g})"
    if not enough:
        return f"rolled back: only {num} tasks could be compared, {min_tasks} are needed"
    if not adopted:
        return f"rolled back: worse by more than noise, {change}"
    return f"adopted: {change}" if mean >= 0 else f"adopted: the drop is within noise, {change}"


def save(decision: GateDecision, path: Path | str) -> None:
    """Writes the decision as JSON, whole or not at all."""
    write_atomic(Path(path), msgspec.json.format(msgspec.json.encode(decision), indent=1).decode() + "\n")


def load(path: Path | str) -> GateDecision:
    """Reads a decision. ValueError when the file is missing or not a decision."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=GateDecision)
    except FileNotFoundError:
        raise ValueError(f"no gate decision at {path}") from None
    except msgspec.DecodeError as error:  # malformed JSON or wrong fields
        raise ValueError(f"{path} is not a gate decision ({error}): remove it to have it decided again") from None
