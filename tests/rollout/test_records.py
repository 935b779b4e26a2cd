"""Records refuse what cannot be, and derive tokens, mask, turns and log-probs from the turns."""

from __future__ import annotations

import math

import msgspec
import pytest
from rollout_helpers import completion, trajectory

from megatron_rsi.rollout.errors import ERROR_POLICY, ErrorKind
from megatron_rsi.rollout.records import Completion, Trajectory, Turn, Verdict


def test_a_completion_has_one_finite_log_prob_a_token() -> None:
    with pytest.raises(ValueError, match="2 ids but 1 log-probs"):
        Completion(ids=[1, 2], logprobs=[-1.0], finish="stop", weight_version=0)
    for bad in (math.nan, -math.inf, math.inf, 0.5):
        with pytest.raises(ValueError, match="finite and <= 0"):
            Completion(ids=[1], logprobs=[bad], finish="stop", weight_version=0)
    with pytest.raises(ValueError, match="unknown finish reason 'abort'"):
        Completion(ids=[1], logprobs=[-1.0], finish="abort", weight_version=0)


def test_stored_records_are_checked_again_when_read() -> None:
    line = msgspec.json.encode(trajectory())
    assert msgspec.json.decode(line, type=Trajectory) == trajectory()
    with pytest.raises(msgspec.ValidationError, match="3 ids but 2 log-probs"):
        msgspec.json.decode(line.replace(b"[-0.5,-0.5,-0.5]", b"[-0.5,-0.5]"), type=Trajectory)
    with pytest.raises(msgspec.ValidationError, match="fraction"):
        msgspec.json.decode(line.replace(b'"fraction":1.0', b'"fraction":1.5'), type=Trajectory)


def test_an_errored_verdict_is_not_a_failed_one() -> None:
    failed, errored = Verdict(passed=False, fraction=0.0), Verdict(error=ErrorKind.VERIFIER_FAILED)
    assert failed != errored
    assert trajectory(verdict=failed).trains and not trajectory(verdict=errored).trains
    with pytest.raises(ValueError, match="cannot have passed and carry the error 'infrastructure'"):
        Verdict(passed=True, error=ErrorKind.INFRASTRUCTURE)
    for fraction in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="fraction must lie in"):
            Verdict(fraction=fraction)


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_what_trains_follows_the_table(kind: ErrorKind) -> None:
    limits = {ErrorKind.AGENT_TIMEOUT, ErrorKind.TURN_LIMIT, ErrorKind.CONTEXT_LIMIT, ErrorKind.REPEATED}
    assert ERROR_POLICY[kind].trains == (kind in limits)
    assert trajectory(stop_reason=kind).trains == (kind in limits)
    assert not (ERROR_POLICY[kind].trains and not ERROR_POLICY[kind].settled), "what trains is never run again"
    assert not (ERROR_POLICY[kind].retry and ERROR_POLICY[kind].settled), "what failed to the last retry is no result"


def test_a_trial_without_a_sampled_token_does_not_train() -> None:
    assert not trajectory(commands=()).trains


def test_derived_streams() -> None:
    """The picture of the module: two turns, the second cut by its length."""
    stop = 99
    turns = [
        Turn(context_ids=[1, 2], completion=Completion(ids=[3, stop], logprobs=[-1.0, -2.0], finish="stop", weight_version=1)),
        Turn(context_ids=[4], completion=Completion(ids=[5, 6], logprobs=[-3.0, -4.0], finish="length", weight_version=1)),
    ]  # fmt: skip
    t = trajectory(turns=turns)
    assert t.tokens == [1, 2, 3, stop, 4, 5, 6]
    assert t.mask == [False, False, True, True, False, True, True]
    assert t.turn_ids == [0, 0, 0, 0, 1, 1, 1]
    assert t.logprobs == [0.0, 0.0, -1.0, -2.0, 0.0, -3.0, -4.0]
    assert sum(t.mask) == t.num_action_tokens == sum(len(x.completion.ids) for x in turns)


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        completion().finish = "length"  # type: ignore[misc]
