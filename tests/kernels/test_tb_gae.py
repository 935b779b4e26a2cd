"""TB-GAE: the nine invariants, the worked case, packing, bootstrap, and refusals. The oracle is a loop over tokens."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rsi.kernels import tb_gae
from megatron_rsi.kernels._count import LiveBytes


def classic_gae(rewards, values, gamma, lambda_, end_value=0.0):
    """Textbook GAE with per-step (gamma_j, lambda_j) for the step j -> j + 1."""
    num = len(rewards)
    gamma, lambda_ = np.broadcast_to(gamma, num), np.broadcast_to(lambda_, num)
    advantages, next_advantage, next_value = np.zeros(num), 0.0, end_value
    for j in reversed(range(num)):
        advantages[j] = rewards[j] + gamma[j] * next_value - values[j] + gamma[j] * lambda_[j] * next_advantage
        next_advantage, next_value = advantages[j], values[j]
    return advantages


def oracle(values, rewards, mask, turns, offsets, gu, lu, gw, lw, bootstrap=None, truncated=None):
    out = np.zeros(len(values))
    for s in range(len(offsets) - 1):
        index = np.arange(offsets[s], offsets[s + 1])
        index = index[mask[index]]
        if len(index) == 0:
            continue
        turn = turns[index]
        crosses = np.r_[turn[1:] != turn[:-1], True]
        end = bootstrap[s] if truncated is not None and truncated[s] else 0.0
        gamma, lambda_ = np.where(crosses, gu, gw), np.where(crosses, lu, lw)
        out[index] = classic_gae(rewards[index], values[index], gamma, lambda_, end)
    return out


def run(values, rewards, turns, mask=None, offsets=None, dtype=torch.float64, **kwargs):
    num = len(values)
    mask = np.ones(num, bool) if mask is None else mask
    offsets = [0, num] if offsets is None else offsets
    for name in ("bootstrap_values", "truncated"):
        if name in kwargs:
            kwargs[name] = torch.as_tensor(kwargs[name], dtype=dtype if name == "bootstrap_values" else torch.bool)
    advantages, returns = tb_gae(
        torch.as_tensor(values, dtype=dtype), torch.as_tensor(rewards, dtype=dtype), torch.as_tensor(mask),
        torch.as_tensor(turns, dtype=torch.int32), torch.as_tensor(offsets, dtype=torch.int32), **kwargs)
    assert advantages.dtype == returns.dtype == dtype
    return advantages.numpy(), returns.numpy()


@pytest.fixture
def trial():
    """Seven turns of 1-8 action tokens, a reward at each turn's end."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 7)
    turns = np.repeat(np.arange(7), lengths)
    values, rewards = rng.normal(size=len(turns)), np.zeros(len(turns))
    ends = np.cumsum(lengths) - 1
    rewards[ends] = rng.normal(size=7)
    return values, rewards, turns, ends, ends - lengths + 1


def test_one_token_turns_are_classic_gae():
    rng = np.random.default_rng(1)
    values, rewards = rng.normal(size=20), rng.normal(size=20)
    advantages, _ = run(values, rewards, np.arange(20), gamma_u=0.97, lambda_u=0.9)
    np.testing.assert_allclose(advantages, classic_gae(rewards, values, 0.97, 0.9), atol=1e-12)


def test_all_ones_is_return_to_go_minus_value(trial):
    values, rewards, turns, *_ = trial
    advantages, returns = run(values, rewards, turns, lambda_u=1.0)
    to_go = np.cumsum(rewards[::-1])[::-1]
    np.testing.assert_allclose(advantages, to_go - values, atol=1e-12)
    np.testing.assert_allclose(returns, to_go, atol=1e-12)


@pytest.mark.parametrize("across", [(0.3, 0.2), (1.0, 0.95)])
def test_single_turn_is_token_gae_whatever_the_turn_parameters(trial, across):
    values, rewards, turns, *_ = trial
    advantages, _ = run(values, rewards, np.zeros_like(turns), gamma_u=across[0], lambda_u=across[1],
                        gamma_w=0.98, lambda_w=0.95)
    np.testing.assert_allclose(advantages, classic_gae(rewards, values, 0.98, 0.95), atol=1e-12)


def test_equal_parameters_are_skip_observation_token_gae(trial):
    values, rewards, turns, *_ = trial
    advantages, _ = run(values, rewards, turns, gamma_u=0.98, lambda_u=0.95, gamma_w=0.98, lambda_w=0.95)
    np.testing.assert_allclose(advantages, classic_gae(rewards, values, 0.98, 0.95), atol=1e-12)


def test_lambda_zero_is_one_turn_bootstrap(trial):
    values, rewards, turns, ends, starts = trial
    advantages, _ = run(values, rewards, turns, gamma_u=0.97, lambda_u=0.0)
    target = rewards[ends] + 0.97 * np.r_[values[starts[1:]], 0.0]
    np.testing.assert_allclose(advantages, target[turns] - values, atol=1e-12)


def test_first_tokens_are_turn_level_gae_and_turns_share_one_return(trial):
    values, rewards, turns, ends, starts = trial
    advantages, _ = run(values, rewards, turns, gamma_u=0.97, lambda_u=0.9)
    by_turn = classic_gae(rewards[ends], values[starts], 0.97, 0.9)
    np.testing.assert_allclose(advantages[starts], by_turn, atol=1e-12)
    np.testing.assert_allclose(advantages + values, (by_turn + values[starts])[turns], atol=1e-12)


def test_bi_level_scheme_is_not_what_we_do(trial):
    """Starting a turn's last token from a turn-level advantage would add V_end - V_start."""
    values, rewards, turns, ends, starts = trial
    advantages, _ = run(values, rewards, turns, gamma_u=0.97, lambda_u=0.9)
    by_turn = classic_gae(rewards[ends], values[starts], 0.97, 0.9)
    bi_level = by_turn[turns] + values[ends][turns] - values
    np.testing.assert_allclose(bi_level - advantages, (values[ends] - values[starts])[turns], atol=1e-12)
    assert np.abs(bi_level - advantages).max() > 0.1


def test_dilation_by_tokens_and_by_observations_changes_no_turn_return(trial):
    values, rewards, turns, *_ = trial
    parameters = dict(gamma_u=0.97, lambda_u=0.9)
    advantages, _ = run(values, rewards, turns, **parameters)
    repeated = np.repeat(np.arange(len(turns)), 3)
    diluted_rewards = np.zeros(len(repeated))
    diluted_rewards[2::3] = rewards
    dilated, _ = run(values[repeated], diluted_rewards, turns[repeated], **parameters)
    np.testing.assert_allclose(dilated + values[repeated], (advantages + values)[repeated], atol=1e-12)
    mask = np.arange(len(repeated)) % 3 == 1  # each action between two observations
    spread_rewards = np.where(mask, rewards[repeated], 7.0)
    spread, _ = run(np.where(mask, values[repeated], np.nan), spread_rewards, turns[repeated], mask, **parameters)
    np.testing.assert_allclose(spread[mask], advantages, atol=1e-12)


@pytest.mark.parametrize("within", [(1.0, 1.0), (0.98, 0.9)])
@pytest.mark.parametrize("garbage", [100.0, float("nan"), float("inf")])
def test_observations_get_zero_and_their_values_change_nothing(trial, within, garbage):
    values, rewards, turns, *_ = trial
    rng = np.random.default_rng(2)
    mask = rng.random(len(turns)) < 0.6
    parameters = dict(gamma_u=0.97, lambda_u=0.9, gamma_w=within[0], lambda_w=within[1])
    clean = run(np.where(mask, values, 0.0), np.where(mask, rewards, 0.0), turns, mask, **parameters)
    dirty = run(np.where(mask, values, garbage), np.where(mask, rewards, garbage), np.where(mask, turns, 999), mask,
                **parameters)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (b[~mask] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("turn_lambda_only", [True, False])
def test_worked_case_decays_through_actions_only(dtype, turn_lambda_only):
    """4 action, 200 observation, 4 action, 3 observation tokens; V = .3, reward 1 on the last action."""
    mask = np.r_[np.ones(4), np.zeros(200), np.ones(4), np.zeros(3)].astype(bool)
    turns = np.r_[np.zeros(4), np.ones(207)].astype(int)
    rewards = np.zeros(211)
    rewards[207] = 1.0
    lambda_w = 1.0 if turn_lambda_only else 0.95
    advantages, _ = run(np.full(211, 0.3), rewards, turns, mask, lambda_u=0.95, lambda_w=lambda_w, dtype=dtype)
    expected = [0.665, 0.665, 0.7] if turn_lambda_only else [0.4888, 0.5702, 0.7]
    np.testing.assert_allclose(advantages[[0, 3, 207]], expected, atol=5e-5)
    assert (advantages[mask] > 0).all()  # a successful trial has no negative advantage on its first turn


@pytest.mark.parametrize("within", [(1.0, 1.0), (0.98, 0.9)])
def test_truncated_bootstraps_and_terminated_does_not(within):
    values, rewards = np.array([0.5, 0.2, 0.4]), np.zeros(3)
    parameters = dict(gamma_u=0.9, lambda_u=0.8, gamma_w=within[0], lambda_w=within[1])
    cut, returns = run(values, rewards, [0, 0, 1], bootstrap_values=[2.0], truncated=[True], **parameters)
    np.testing.assert_allclose(cut[2], 0.9 * 2.0 - 0.4, atol=1e-12)
    np.testing.assert_allclose(returns[2], 0.9 * 2.0, atol=1e-12)
    plain, _ = run(values, rewards, [0, 0, 1], **parameters)
    ended, _ = run(values, rewards, [0, 0, 1], bootstrap_values=[np.nan], truncated=[False], **parameters)
    np.testing.assert_array_equal(ended, plain)
    np.testing.assert_allclose(ended[2], -0.4, atol=1e-12)


@st.composite
def packs(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    num, offsets = sum(lengths), np.cumsum([0, *lengths])
    parameters = tuple(draw(st.sampled_from([1.0, 0.95, 0.5, 0.0])) for _ in range(6))
    within_one = draw(st.booleans())
    gu, lu, gw, lw, cu_, cw = parameters
    if within_one:
        gw = lw = cw = 1.0
    rewards = np.where(rng.random(num) < 0.2, rng.normal(size=num), 0.0)
    turns = np.sort(rng.integers(0, 5, num)) if draw(st.booleans()) else rng.integers(0, 3, num)
    return dict(values=rng.normal(size=num), rewards=rewards, turns=turns, mask=rng.random(num) < draw(
        st.sampled_from([0.0, 0.5, 1.0])), offsets=offsets, bootstrap=rng.normal(size=len(lengths)),
        truncated=rng.random(len(lengths)) < 0.5, decay=(gu, lu, gw, lw, cu_, cw))


@settings(max_examples=150, deadline=None)
@given(packs())
def test_equals_a_loop_over_tokens_packed_and_alone(pack):
    gu, lu, gw, lw, critic_u, critic_w = pack["decay"]
    parameters = dict(gamma_u=gu, lambda_u=lu, gamma_w=gw, lambda_w=lw, critic_lambda_u=critic_u,
                      critic_lambda_w=critic_w)
    arrays = [pack[name] for name in ("values", "rewards", "mask", "turns", "offsets")]
    tails = (pack["bootstrap"], pack["truncated"])
    got = run(pack["values"], pack["rewards"], pack["turns"], pack["mask"], pack["offsets"],
              bootstrap_values=tails[0], truncated=tails[1], **parameters)
    expected = oracle(*arrays, gu, lu, gw, lw, *tails)
    expected_returns = np.where(pack["mask"], oracle(*arrays, gu, critic_u, gw, critic_w, *tails) + pack["values"], 0.0)
    np.testing.assert_allclose(got[0], expected, atol=1e-10)
    np.testing.assert_allclose(got[1], expected_returns, atol=1e-10)
    for s, (start, stop) in enumerate(zip(pack["offsets"][:-1], pack["offsets"][1:], strict=True)):
        part = slice(start, stop)
        alone = run(pack["values"][part], pack["rewards"][part], pack["turns"][part], pack["mask"][part],
                    bootstrap_values=tails[0][s:s + 1], truncated=tails[1][s:s + 1], **parameters)
        np.testing.assert_allclose(got[0][part], alone[0], atol=1e-10)
        np.testing.assert_allclose(got[1][part], alone[1], atol=1e-10)


@pytest.mark.parametrize("within", [(1.0, 1.0), (0.999, 0.98)])
@pytest.mark.parametrize("num_sequences,length", [(1, 70_001), (50, 1_400)])
@pytest.mark.parametrize("group_tokens", [1 << 18, 1 << 12])
def test_long_inputs_take_the_blocked_scan_and_groups(monkeypatch, within, num_sequences, length, group_tokens):
    monkeypatch.setattr(sys.modules[tb_gae.__module__], "_GROUP_TOKENS", group_tokens)
    rng = np.random.default_rng(3)
    num = num_sequences * length
    values = rng.normal(size=num).astype(np.float32)
    rewards = (rng.random(num) < 0.05).astype(np.float32)
    mask, turns = rng.random(num) < 0.7, np.arange(num) // 9
    offsets = np.arange(num_sequences + 1) * length
    expected = oracle(values.astype(float), rewards, mask, turns, offsets, 0.999, 0.95, *within)
    parameters = dict(gamma_u=0.999, lambda_u=0.95, gamma_w=within[0], lambda_w=within[1])
    wide, _ = run(values, rewards, turns, mask, offsets, **parameters)
    np.testing.assert_allclose(wide, expected, atol=1e-9)
    single, _ = run(values, rewards, turns, mask, offsets, dtype=torch.float32, **parameters)
    np.testing.assert_allclose(single, expected, atol=2e-4)


@pytest.mark.parametrize("num_sequences,within,bytes_per_token", [(1, 1.0, 13), (1, 0.9, 37), (16, 1.0, 13), (16, 0.9, 16)])
def test_memory_is_bounded_by_a_group_or_the_longest_trajectory(num_sequences, within, bytes_per_token):
    """8 bytes a token are the two results; turns of 1,000 tokens, half of them observations."""
    num = 1 << 20
    mask = torch.arange(num) // 500 % 2 == 1
    arguments = [torch.randn(num), torch.zeros(num), mask, (torch.arange(num) // 1000).int(),
                 torch.arange(num_sequences + 1) * (num // num_sequences)]
    with LiveBytes() as seen:
        tb_gae(*arguments, lambda_w=within)
    assert 8 * num < seen.peak < bytes_per_token * num


def test_rewards_inside_a_turn_reach_only_earlier_tokens():
    rewards = np.array([0.0, 1.0, 0.0, 0.0, 2.0, 0.0])
    advantages, _ = run(np.zeros(6), rewards, [0, 0, 0, 1, 1, 1], gamma_u=0.5, lambda_u=1.0)
    np.testing.assert_allclose(advantages, [2.0, 2.0, 1.0, 2.0, 2.0, 0.0])


@pytest.mark.parametrize("within", [1.0, 0.9])
def test_nothing_to_do(within):
    empty = run([], [], [], np.zeros(0, bool), [0], gamma_w=within)
    assert empty[0].shape == empty[1].shape == (0,)
    masked = run([np.nan] * 3, [1.0] * 3, [0] * 3, np.zeros(3, bool), [0, 0, 3, 3], gamma_w=within)
    assert (masked[0] == 0).all() and (masked[1] == 0).all()
    single = run([0.25], [1.0], [0], gamma_w=within)
    assert single[0].tolist() == [0.75] and single[1].tolist() == [1.0]


def test_inputs_are_unchanged_and_int64_is_accepted(trial):
    values, rewards, turns, *_ = trial
    tensors = [torch.tensor(values), torch.tensor(rewards), torch.ones(len(turns), dtype=torch.bool),
               torch.tensor(turns), torch.tensor([0, len(turns)])]
    before = [t.clone() for t in tensors]
    for gamma_w in (1.0, 0.9):
        tb_gae(*tensors, gamma_w=gamma_w)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("change,message", [
    (dict(values=torch.zeros(3)), r"rewards: shape \(4,\), expected \(3,\)"),
    (dict(values=torch.zeros(2, 2)), "one dimension"),
    (dict(rewards=torch.zeros(4, dtype=torch.float64)), "rewards: dtype torch.float64"),
    (dict(mask=torch.ones(4)), "mask: dtype torch.float32"),
    (dict(turn_ids=torch.zeros(4)), "turn_ids: dtype"),
    (dict(cu_seqlens=torch.tensor([0, 3])), "from 0 to 3, expected from 0 to T=4"),
    (dict(cu_seqlens=torch.tensor([1, 4])), "from 1 to 4"),
    (dict(cu_seqlens=torch.tensor([0, 3, 2, 4])), "decreases"),
    (dict(cu_seqlens=torch.tensor([], dtype=torch.int32)), "at least"),
    (dict(gamma_u=1.1), r"gamma_u=1.1: must be a finite number in \[0.0, 1.0\]"),
    (dict(lambda_w=-0.1), "lambda_w=-0.1"),
    (dict(critic_lambda_u=float("nan")), "critic_lambda_u=nan"),
    (dict(truncated=torch.tensor([True])), "give both or neither"),
    (dict(truncated=torch.tensor([True, False]), bootstrap_values=torch.zeros(1)), "truncated: shape"),
    (dict(impl="cuda"), "impl='cuda': choose one of auto, triton, torch"),
])
def test_wrong_arguments_are_refused_with_what_to_change(change, message):
    arguments = dict(values=torch.zeros(4), rewards=torch.zeros(4), mask=torch.ones(4, dtype=torch.bool),
                     turn_ids=torch.zeros(4, dtype=torch.int32), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=message):
        tb_gae(**{**arguments, **change})
