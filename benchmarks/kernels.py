"""Our torch kernels against common forms of the same work on the CPU.

    python -m benchmarks.kernels [--json FILE] [--small]

Each pair computes the same numbers (checked before timing) in one process on one thread; the ratio is peer time / our
time, the best of a few alternating runs of each. Times depend on the machine; ratios less so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rsi.kernels import linear_logprob, logprob, ppo_loss, tb_gae

Run = Callable[[], tuple[Tensor, ...]]


class Pair(NamedTuple):
    name: str
    peer: str
    ours_run: Run
    peer_run: Run
    tolerance: float = 1e-3


def gae_loop(values: Tensor, rewards: Tensor, gamma: float, lambda_: float) -> tuple[Tensor, Tensor]:
    """The usual form: padded [S, L], a Python step a token."""
    advantages, last, following = torch.zeros_like(values), torch.zeros(len(values)), torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * lambda_ * last
        advantages[:, t], following = last, values[:, t]
    return advantages.flatten(), (advantages + values).flatten()


def gae_pairs(num_sequences: int, length: int) -> list[Pair]:
    num = num_sequences * length
    values, rewards = torch.randn(num), torch.zeros(num)
    rewards[length - 1::length] = 1.0
    packed = (values, rewards, torch.ones(num, dtype=torch.bool))
    offsets = torch.arange(num_sequences + 1) * length
    shape = f"{num_sequences}x{length}"
    turns = (torch.arange(num) // 100).int()

    def peer(lambda_: float) -> Run:
        return lambda: gae_loop(values.view(num_sequences, -1), rewards.view(num_sequences, -1), 1.0, lambda_)

    return [
        Pair(f"tb_gae {shape}, runs", "loop a token", lambda: tb_gae(*packed, turns, offsets, lambda_u=1.0), peer(1.0)),
        Pair(f"tb_gae {shape}, general", "loop a token", lambda: tb_gae(
            *packed, turns, offsets, lambda_u=0.95, lambda_w=0.95, critic_lambda_u=0.95, critic_lambda_w=0.95),
            peer(0.95)),
    ]


def logprob_pairs(num_tokens: int, hidden_size: int, vocab: int) -> list[Pair]:
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    weight = (torch.randn(vocab, hidden_size) * 0.1).requires_grad_()
    logits = (hidden @ weight.t()).detach().requires_grad_()
    targets, upstream = torch.randint(0, vocab, (num_tokens,)), torch.randn(num_tokens)

    def with_grads(function: Callable[[], Tensor], *inputs: Tensor) -> Run:
        def run() -> tuple[Tensor, ...]:
            out = function()
            return out.detach(), *torch.autograd.grad(out @ upstream, inputs)

        return run

    def gathered(scores: Tensor) -> Tensor:
        return scores.log_softmax(1).gather(1, targets[:, None]).squeeze(1)

    shape = f"{num_tokens}x{hidden_size}x{vocab}"
    plain = with_grads(lambda: gathered(hidden @ weight.t()), hidden, weight)
    ours = with_grads(lambda: linear_logprob(hidden, weight, targets)[0], hidden, weight)
    tight = num_tokens * vocab * 4 // 8
    bounded = with_grads(lambda: linear_logprob(hidden, weight, targets, max_workspace_bytes=tight)[0], hidden, weight)
    pairs = [
        Pair(f"logprob {shape}", "log_softmax + gather", with_grads(lambda: logprob(logits, targets)[0], logits),
             with_grads(lambda: gathered(logits), logits)),
        Pair(f"linear_logprob {shape}", "product + log_softmax + gather", ours, plain),
        Pair(f"linear_logprob {shape}, 1/8 of the scores held", "product + log_softmax + gather", bounded, plain),
    ]
    if hasattr(F, "linear_cross_entropy"):
        fused = with_grads(lambda: -F.linear_cross_entropy(hidden, weight, targets, reduction="none"), hidden, weight)
        pairs.append(Pair(f"linear_logprob {shape}", "F.linear_cross_entropy", ours, fused))
    return pairs


def ppo_pairs(num: int) -> list[Pair]:
    old, advantages, returns, old_values = (torch.randn(num) for _ in range(4))
    new = (old + 0.1 * torch.randn(num)).requires_grad_()
    values = (old_values + 0.2 * torch.randn(num)).requires_grad_()
    mask = torch.rand(num) < 0.5

    def ours() -> tuple[Tensor, ...]:
        loss, _ = ppo_loss(new, old, advantages, mask, values=values, old_values=old_values, returns=returns,
                           num_tokens_global=num)
        return loss.detach(), *torch.autograd.grad(loss, (new, values))

    def unfused() -> tuple[Tensor, ...]:
        live = mask.float()
        ratio = (new - old).exp()
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        moved = old_values + (values - old_values).clamp(-0.2, 0.2)
        value = 0.5 * torch.max((values - returns) ** 2, (moved - returns) ** 2)
        loss = ((policy + value) * live).sum() / num
        with torch.no_grad():  # the metrics ours yields as well
            error = returns - values
            for metric in (ratio - 1 - (new - old), ((ratio - 1).abs() > 0.2).float(), policy, value, returns,
                           returns**2, error, error**2, ((values - old_values).abs() > 0.2).float()):
                (metric * live).sum()
            torch.where(mask, ratio, 1.0).aminmax()
        return loss.detach(), *torch.autograd.grad(loss, (new, values))

    return [Pair(f"ppo_loss {num}, policy + value + metrics", "unfused", ours, unfused)]


def measure(pair: Pair, repeats: int) -> dict[str, str | float]:
    for ours, peer in zip(pair.ours_run(), pair.peer_run(), strict=True):
        torch.testing.assert_close(ours, peer, rtol=pair.tolerance, atol=pair.tolerance)
    best = {"ours": float("inf"), "peer": float("inf")}
    for _ in range(repeats):
        for name, run in (("ours", pair.ours_run), ("peer", pair.peer_run)):
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return {"op": pair.name, "peer": pair.peer, "ours_ms": best["ours"] * 1e3, "peer_ms": best["peer"] * 1e3,
            "ratio": best["peer"] / best["ours"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", help="also write the table to this file")
    parser.add_argument("--small", action="store_true", help="small shapes, a few seconds: checks that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.small:
        pairs, repeats = [*gae_pairs(8, 256), *logprob_pairs(200, 32, 128), *ppo_pairs(20_000)], 2
    else:
        pairs, repeats = [*gae_pairs(256, 4096), *logprob_pairs(2000, 128, 768), *logprob_pairs(2048, 256, 8192),
                          *ppo_pairs(1 << 20)], 5
    rows = []
    for pair in pairs:
        rows.append(row := measure(pair, repeats))
        print(f"{row['op']:<58} {row['peer']:<32} {row['ours_ms']:>9.2f} ms {row['peer_ms']:>9.2f} ms "
              f"{row['ratio']:>7.2f}x", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "threads": 1, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
