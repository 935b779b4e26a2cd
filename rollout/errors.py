"""What each kind of failure means for a trial: retry it, let it stand, train on it.

A bad rollout is data, not a crash. Every failure of an attempt is one of these kinds, and this table is the only
place that decides what follows. Infrastructure failures are never graded, so they can never become a reward of 0.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Policy(NamedTuple):
    """``retry``: run the attempt again at once. ``settled``: it stands, a later run of the same batch does not try it
    again. ``trains``: the reward may be trained on."""

    retry: bool
    settled: bool
    trains: bool


class ErrorKind(StrEnum):
    INFRASTRUCTURE = "infrastructure"  # sandbox did not start, died, out of memory, upload failed
    ENGINE = "engine"  # the policy engine failed or answered garbage
    VERIFIER_TIMEOUT = "verifier_timeout"
    VERIFIER_FAILED = "verifier_failed"  # reward file missing, empty or invalid
    TASK_INVALID = "task_invalid"  # malformed task folder
    AGENT_TIMEOUT = "agent_timeout"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    REPEATED = "repeated"  # the same command got the same answer too often in a row


class EngineError(RuntimeError):
    """The policy engine failed (not the policy). Callers map it to ``ErrorKind.ENGINE``."""


ERROR_POLICY: dict[ErrorKind, Policy] = {
    ErrorKind.INFRASTRUCTURE: Policy(retry=True, settled=False, trains=False),
    ErrorKind.ENGINE: Policy(retry=True, settled=False, trains=False),
    ErrorKind.VERIFIER_TIMEOUT: Policy(retry=False, settled=True, trains=False),
    ErrorKind.VERIFIER_FAILED: Policy(retry=False, settled=True, trains=False),
    ErrorKind.TASK_INVALID: Policy(retry=False, settled=False, trains=False),
    ErrorKind.AGENT_TIMEOUT: Policy(retry=False, settled=True, trains=True),
    ErrorKind.TURN_LIMIT: Policy(retry=False, settled=True, trains=True),
    ErrorKind.CONTEXT_LIMIT: Policy(retry=False, settled=True, trains=True),
    ErrorKind.REPEATED: Policy(retry=False, settled=True, trains=True),
}
