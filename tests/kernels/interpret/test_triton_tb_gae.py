"""Triton TB-GAE in the interpreter against a float64 loop over tokens."""

import numpy as np
import pytest
import torch

from megatron_rsi.kernels import tb_gae

TOLERANCE = dict(atol=2e-5, rtol=2e-5)


def oracle(values, rewards, mask, turns, offsets, gu, lu, gw, lw, bootstrap, truncated):
    out = np.zeros(len(values))
    for s in range(len(offsets) - 1):
        following, next_value, next_advantage = None, bootstrap[s] if truncated[s] else 0.0, 0.0
        for t in reversed(range(offsets[s], offsets[s + 1])):
            if not mask[t]:
                continue
            crosses = following is None or turns[t] != turns[following]
            gamma, lambda_ = (gu, lu) if crosses else (gw, lw)
            next_advantage = rewards[t] + gamma * next_value - values[t] + gamma * lambda_ * next_advantage
            out[t], next_value, following = next_advantage, values[t], t
    return out


DECAYS = {  # gamma_u, lambda_u, gamma_w, lambda_w, critic_lambda_u, critic_lambda_w
    "default": (1.0, 0.95, 1.0, 1.0, 1.0, 1.0),
    "general": (0.99, 0.9, 0.97, 0.95, 1.0, 0.98),
    "one step": (0.9, 0.0, 1.0, 0.5, 0.0, 0.0),
}


@pytest.mark.parametrize("decay", list(DECAYS))
@pytest.mark.parametrize("live", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [0, 200, 0, 3], [2, 1, 129]])  # the block is 64 tokens
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_equals_a_loop_over_tokens(decay, live, lengths, integers):
    rng = np.random.default_rng(sum(lengths))
    num, offsets = sum(lengths), np.cumsum([0, *lengths])
    values, rewards = rng.normal(size=num), np.where(rng.random(num) < 0.3, rng.normal(size=num), 0.0)
    mask, turns = rng.random(num) < live, np.arange(num) // 5
    bootstrap, truncated = rng.normal(size=len(lengths)), rng.random(len(lengths)) < 0.5
    gu, lu, gw, lw, critic_u, critic_w = DECAYS[decay]
    expected = oracle(values, rewards, mask, turns, offsets, gu, lu, gw, lw, bootstrap, truncated)
    critic = oracle(values, rewards, mask, turns, offsets, gu, critic_u, gw, critic_w, bootstrap, truncated)
    arguments = [torch.tensor(np.where(mask, values, np.nan)).float(),
                 torch.tensor(np.where(mask, rewards, np.inf)).float(),
                 torch.tensor(mask), torch.tensor(np.where(mask, turns, -7)).to(integers),
                 torch.tensor(offsets).to(integers)]
    before = [x.clone() for x in arguments]
    advantages, returns = tb_gae(
        *arguments, gamma_u=gu, lambda_u=lu, gamma_w=gw, lambda_w=lw, critic_lambda_u=critic_u,
        critic_lambda_w=critic_w,
        bootstrap_values=torch.tensor(np.where(truncated, bootstrap, np.nan)).float(),
        truncated=torch.tensor(truncated), impl="triton")
    np.testing.assert_allclose(advantages.numpy(), expected, **TOLERANCE)
    np.testing.assert_allclose(returns.numpy(), np.where(mask, critic + values, 0.0), **TOLERANCE)
    assert (advantages[~arguments[2]] == 0).all() and (returns[~arguments[2]] == 0).all()
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(arguments, before, strict=True))


def test_worked_case_decays_through_actions_only():
    """4 action, 200 observation, 4 action, 3 observation tokens; V = .3, reward 1 on the last action."""
    mask = torch.zeros(211, dtype=torch.bool)
    mask[:4] = mask[204:208] = True
    rewards, turns = torch.zeros(211), (torch.arange(211) >= 4).int()
    rewards[207] = 1.0
    advantages, _ = tb_gae(torch.full((211,), 0.3), rewards, mask, turns, torch.tensor([0, 211]), lambda_u=0.95,
                           lambda_w=0.95, impl="triton")
    torch.testing.assert_close(advantages[[0, 3, 207]], torch.tensor([0.4888, 0.5702, 0.7]), atol=5e-5, rtol=0)


def test_no_token_and_no_trajectory():
    empty = torch.zeros(0)
    for offsets in ([0], [0, 0, 0]):
        out = tb_gae(empty, empty, empty.bool(), empty.int(), torch.tensor(offsets), impl="triton")
        assert out[0].shape == out[1].shape == (0,)


def test_float64_is_left_to_torch():
    x = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        tb_gae(x, x, x.bool(), x.int(), torch.tensor([0, 3]), impl="triton")
