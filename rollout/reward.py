"""Success-Prioritized Reward: no failure, whatever its partial score, ever outranks a success."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ErrorKind
from .records import Task, Trajectory


@dataclass(frozen=True)
class SuccessPrioritizedReward:
    """
    success:    R = 1 - rho min(1, turns / budget)                           in [1 - rho, 1]
    failure:    R = clip(alpha f - penalties, -kappa, alpha),  f = max(0, (fraction - f0) / (1 - f0))
    integrity:  R = -kappa, whatever the verifier said

    A trial whose error does not train (infrastructure, a crashed verifier) has no reward at all: ``of`` returns None.
    Raises ValueError unless 0 <= alpha < 1, alpha + margin <= 1 - rho, margin > 0, kappa >= 0 and penalties >= 0.
    """

    alpha: float = 0.4
    rho: float = 0.0
    margin: float = 0.25
    kappa: float = 0.1
    penalty_timeout: float = 0.05
    penalty_budget: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(f"reward.alpha must lie in [0, 1), got {self.alpha}")
        if not self.margin > 0 or not self.rho >= 0 or not self.kappa >= 0:
            raise ValueError(
                f"reward needs margin > 0, rho >= 0, kappa >= 0; got {self.margin}, {self.rho}, {self.kappa}"
            )
        if min(self.penalty_timeout, self.penalty_budget) < 0:
            raise ValueError("reward penalties must be >= 0")
        if self.alpha + self.margin > 1 - self.rho + 1e-12:
            raise ValueError(
                f"reward.alpha + reward.margin = {self.alpha + self.margin} must be <= 1 - reward.rho = {1 - self.rho}, "
                "or a failure could come near a success"
            )

    def value(
        self, *, passed: bool, fraction: float, baseline: float = 0.0, turns: int = 0, budget: int = 1,
        timed_out: bool = False, out_of_budget: bool = False, integrity: bool = False,
    ) -> float:  # fmt: skip
        if integrity:
            return -self.kappa
        if passed:
            return 1.0 - self.rho * min(1.0, turns / budget)
        gained = max(0.0, (fraction - baseline) / (1.0 - baseline))
        raw = self.alpha * gained - self.penalty_timeout * timed_out - self.penalty_budget * out_of_budget
        return min(self.alpha, max(-self.kappa, raw))

    def of(self, trajectory: Trajectory, task: Task) -> float | None:
        """The reward of a finished attempt, None when it must not train."""
        if not trajectory.trains:
            return None
        verdict, stop = trajectory.verdict, trajectory.stop_reason
        return self.value(
            passed=verdict.passed,
            fraction=verdict.fraction,
            baseline=task.baseline_fraction,
            turns=len(trajectory.turns),
            budget=task.max_turns,
            timed_out=stop is ErrorKind.AGENT_TIMEOUT,
            out_of_budget=stop in (ErrorKind.TURN_LIMIT, ErrorKind.CONTEXT_LIMIT, ErrorKind.REPEATED),
            integrity=bool(verdict.integrity),
        )
