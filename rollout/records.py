"""The records that travel between the parts. Frozen, validated on construction, stored as JSON lines.

A trajectory is one packed stream of tokens, kept as turns. Each turn is what the policy was shown since its last turn
(``context_ids``) followed by what it sampled (``completion.ids``)::

    turn 0                        turn 1
    context_ids    completion     context_ids    completion
    [u: move a b]  [mv a b <end>] [t: ok]        [done <end>]
    mask 0 0 0 0    1  1 1 1       0  0           1    1

``tokens``, ``mask``, ``turn_ids`` and ``logprobs`` are derived from the turns and never stored a second time.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import NamedTuple

import msgspec

from .errors import ERROR_POLICY, ErrorKind


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a completion were sampled by weights of ``version``."""

    start: int
    end: int
    version: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine sampled in one call.

    >>> Completion(ids=[5, 9], logprobs=[-0.1, -0.2], finish="stop", weight_version=3).ids
    [5, 9]

    ``ids`` holds the stop token when ``finish == "stop"``; ``logprobs`` are natural logs at the sampling temperature.
    ``weight_version`` is that of the last token; where weights were swapped meanwhile ``version_spans`` tells all.
    Raises ValueError when the lengths differ or a log-prob is not a finite number <= 0.
    """

    ids: list[int]
    logprobs: list[float]
    finish: str  # "stop" | "length"
    weight_version: int
    version_spans: list[VersionSpan] = []

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"completion has {len(self.ids)} ids but {len(self.logprobs)} log-probs")
        if self.finish not in ("stop", "length"):
            raise ValueError(f"unknown finish reason {self.finish!r}, expected 'stop' or 'length'")
        if any(not math.isfinite(p) or p > 1e-4 for p in self.logprobs):
            raise ValueError("log-probs must be finite and <= 0")


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One policy call: the tokens shown since the last call, what was sampled, and what it did in the sandbox."""

    context_ids: list[int]
    completion: Completion
    command: str = ""
    observation: str = ""
    exit_code: int | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check of the verifier (a CTRF test)."""

    name: str
    passed: bool
    weight: float = 1.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the verifier said. An errored verdict (``error`` set) is not a failed one: it has no grade.

    ``fraction`` is the weighted share of checks passed, in [0, 1]. ``integrity`` lists evidence of tampering.
    """

    passed: bool = False
    fraction: float = 0.0
    checks: list[Check] = []
    integrity: list[str] = []
    error: ErrorKind | None = None
    message: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fraction) and 0.0 <= self.fraction <= 1.0):
            raise ValueError(f"fraction must lie in [0, 1], got {self.fraction}")
        if self.passed and self.error is not None:
            raise ValueError(f"a verdict cannot have passed and carry the error {self.error.value!r}")


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One finished attempt. ``stop_reason`` is None when the agent ended the trial itself.

    ``attempt_id`` names the attempt for ever: stage, task, harness and sample number, e.g. ``c0.rsr.discover/t17/retry/2``.
    """

    attempt_id: str
    task_id: str
    harness: str
    turns: list[Turn]
    verdict: Verdict
    temperature: float = 1.0
    stop_reason: ErrorKind | None = None
    guidance: str = ""  # runbook shown as private guidance; never part of a training sample
    wall_s: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """The whole stream, int[T]."""
        return list(chain.from_iterable(t.context_ids + t.completion.ids for t in self.turns))

    @property
    def mask(self) -> list[bool]:
        """bool[T], True where the policy sampled the token."""
        return list(
            chain.from_iterable([False] * len(t.context_ids) + [True] * len(t.completion.ids) for t in self.turns)
        )

    @property
    def turn_ids(self) -> list[int]:
        """int[T], the turn each token belongs to (context tokens carry the turn they lead into)."""
        return list(
            chain.from_iterable([n] * (len(t.context_ids) + len(t.completion.ids)) for n, t in enumerate(self.turns))
        )

    @property
    def logprobs(self) -> list[float]:
        """float[T], engine log-probs at sampled tokens, 0 elsewhere."""
        return list(chain.from_iterable([0.0] * len(t.context_ids) + t.completion.logprobs for t in self.turns))

    @property
    def num_action_tokens(self) -> int:
        return sum(len(t.completion.ids) for t in self.turns)

    @property
    def trains(self) -> bool:
        """Whether the reward of this attempt may be trained on."""
        kinds = [k for k in (self.verdict.error, self.stop_reason) if k is not None]
        return self.num_action_tokens > 0 and all(ERROR_POLICY[k].trains for k in kinds)


class Healthcheck(msgspec.Struct, frozen=True, kw_only=True):
    """A command that must succeed before the agent starts, tried ``retries`` times."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    retries: int = 3


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A Harbor task folder, read and checked."""

    task_id: str
    path: str
    instruction: str
    workdir: str = "/app"
    env: dict[str, str] = {}
    agent_timeout_s: float = 120.0
    verifier_timeout_s: float = 30.0
    verifier_env: dict[str, str] = {}
    solution_env: dict[str, str] = {}
    max_turns: int = 20
    memory_mb: int | None = None  # this and the next three: None leaves it to the configuration
    cpus: float | None = None
    storage_mb: int | None = None
    healthcheck: Healthcheck | None = None
    docker_image: str | None = None
    baseline_fraction: float = 0.0  # f0: the share of checks that hold before anything is done


class Runbook(msgspec.Struct, frozen=True, kw_only=True):
    """A plan distilled from one success. ``runbook_id`` names its source attempt and sample number."""

    runbook_id: str
    task_id: str
    text: str
    depth: int = 0
    turns: list[Turn] = []


class Review(msgspec.Struct, frozen=True, kw_only=True):
    """Accepts or rejects a runbook. ``source`` is ``screen`` (deterministic) or ``model``."""

    runbook_id: str
    accepted: bool
    source: str
    reasons: list[str] = []
