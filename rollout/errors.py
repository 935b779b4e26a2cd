"""What each kind of failure means for a trial: retry it, grade it, train on it.

A bad rollout is data, not a crash. Every failure of an attempt is one of these kinds, and this table is the only
place that decides what follows. Infrastructure failures are never graded, so they can never become a reward of 0.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Policy(NamedTuple):
    """``retry``: run the attempt again. ``grade``: run the verifier. ``trains``: the reward may be trained on."""

    retry: bool
    grade: bool
    trains: bool


class ErrorKind(StrEnum):
    INFRASTRUCTURE = "infrastructure"  # sandbox did not start, died, out of memory, upload failed
    ENGINE = "engine"  # the policy engine failed or answered garbage
    VERIFIER_TIMEOUT = "verifier_timeout"
    VERIFIER_FAILED = "verifier_failed"  # reward file missing, empty or invalid
    CANCELLED = "cancelled"
    TASK_INVALID = "task_invalid"  # malformed task folder
    AGENT_TIMEOUT = "agent_timeout"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    REPEATED = "repeated"  # the same command got the same answer too often in a row


ERROR_POLICY: dict[ErrorKind, Policy] = {
    ErrorKind.INFRASTRUCTURE: Policy(retry=True, grade=False, trains=False),
    ErrorKind.ENGINE: Policy(retry=True, grade=True, trains=False),
    ErrorKind.VERIFIER_TIMEOUT: Policy(retry=False, grade=True, trains=False),
    ErrorKind.VERIFIER_FAILED: Policy(retry=False, grade=True, trains=False),
    ErrorKind.CANCELLED: Policy(retry=False, grade=False, trains=False),
    ErrorKind.TASK_INVALID: Policy(retry=False, grade=False, trains=False),
    ErrorKind.AGENT_TIMEOUT: Policy(retry=False, grade=True, trains=True),
    ErrorKind.TURN_LIMIT: Policy(retry=False, grade=True, trains=True),
    ErrorKind.CONTEXT_LIMIT: Policy(retry=False, grade=True, trains=True),
    ErrorKind.REPEATED: Policy(retry=False, grade=True, trains=True),
}
