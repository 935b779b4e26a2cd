"""Our torch kernels against the forms other trainers use for the same work, on the CPU.

    python -m benchmarks.kernels [--small] [--repeats N] [--json FILE] [--figure FILE]

Each pair computes the same numbers (checked before anything is timed) in one process on one thread. A pair runs ours and
the peer in turn, N times; each round gives one ratio peer / ours of processor time (not of the clock: a busy machine
counts what the process used), and the table shows the median ratio, its lowest and highest round, and the peak of the
bytes that operators allocate as a share of the peer's. Peers are written here in the form of the named project (no
padding, whitening or logging around them), or called where they are installed: Liger is optional
(`pip install -e '.[bench]'`). cut_cross_entropy and verl's kernel need a GPU: scripts/gpu_check.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rsi.kernels import linear_logprob, logprob, ppo_loss, tb_gae
from megatron_rsi.kernels._count import LiveBytes

Run = Callable[[], tuple[Tensor, ...]]


class Pair(NamedTuple):
    name: str
    peer: str
    ours_run: Run
    peer_run: Run
    tolerance: float = 1e-3
    memory: bool = True  # count the bytes of both; a loop a token makes too many tensors to count


# ---------------------------------------------------------------------------------------------------------- TB-GAE


def masked_loop(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lambda_: float) -> tuple[Tensor, Tensor]:
    """verl's form: padded [S, L], a Python step a token, observation tokens carried over by the mask."""
    following, last, steps = torch.zeros(len(values)), torch.zeros(len(values)), []
    for t in reversed(range(values.shape[1])):
        live = mask[:, t]
        step = rewards[:, t] + gamma * following - values[:, t] + gamma * lambda_ * last
        following = values[:, t] * live + (1 - live) * following
        last = step * live + (1 - live) * last
        steps.append(last)
    advantages = torch.stack(steps[::-1], dim=1)
    return advantages * mask, (advantages + values) * mask


def plain_loop(values: Tensor, rewards: Tensor, gamma: float, lambda_: float) -> tuple[Tensor, Tensor]:
    """TRL's and AReaL's form without a mask: right only where every token is an action."""
    following, last, steps = torch.zeros(len(values)), torch.zeros(len(values)), []
    for t in reversed(range(values.shape[1])):
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * lambda_ * last
        following = values[:, t]
        steps.append(last)
    advantages = torch.stack(steps[::-1], dim=1)
    return advantages, advantages + values


def chunked(values: Tensor, rewards: Tensor, gamma: float, lambda_: float, chunk: int = 128) -> tuple[Tensor, Tensor]:
    """slime's form: padded [S, L], a triangular product inside a chunk, a Python step a chunk. No mask."""
    num, length = values.shape
    following = F.pad(values[:, 1:], (0, 1))
    delta = (rewards + gamma * following - values).flip(1).view(num, length // chunk, chunk)
    power = torch.arange(chunk)
    decay = gamma * lambda_
    distance = (power[None, :] - power[:, None]).clamp(min=0)
    inside = delta @ torch.triu(decay ** distance.float())
    carry_by = decay ** (power + 1).float()
    last, blocks = torch.zeros(num), []
    for k in range(length // chunk):
        blocks.append(inside[:, k] + last[:, None] * carry_by)
        last = blocks[-1][:, -1]
    advantages = torch.cat(blocks, dim=1).flip(1)
    return advantages, advantages + values


def gae_pairs(num_sequences: int, length: int) -> list[Pair]:
    num, shape = num_sequences * length, f"{num_sequences}x{length}"
    values, rewards, offsets = torch.randn(num), torch.zeros(num), torch.arange(num_sequences + 1) * length
    rewards[length - 1 :: length] = 1.0
    turns = (torch.arange(num) // 100).int()
    half = torch.arange(num) // 50 % 2 == 1  # 50 observation tokens, then 50 action tokens
    half[length - 1 :: length] = True
    every = torch.ones(num, dtype=torch.bool)
    padded = values.view(num_sequences, -1), rewards.view(num_sequences, -1)
    fast = dict(lambda_u=1.0)
    general = dict(lambda_u=0.95, lambda_w=0.95, critic_lambda_u=0.95, critic_lambda_w=0.95)

    def ours(mask: Tensor, decay: dict[str, float]) -> Run:
        return lambda: tb_gae(values, rewards, mask, turns, offsets, **decay)

    def flat(function: Callable[..., tuple[Tensor, Tensor]], *arguments: Any) -> Run:
        return lambda: tuple(x.flatten() for x in function(*arguments))

    pairs = []
    for label, decay, lambda_ in (("runs", fast, 1.0), ("general", general, 0.95)):
        for what, mask in (("half observations", half), ("actions only", every)):
            peer = flat(masked_loop, *padded, mask.view(num_sequences, -1).float(), 1.0, lambda_)
            pairs.append(Pair(f"tb_gae {label}, {shape}, {what}", "loop a token, mask (verl)", ours(mask, decay), peer,
                              memory=False))
        for peer_name, function in (("loop a token (TRL, AReaL)", plain_loop), ("chunks (slime)", chunked)):
            peer = flat(function, *padded, 1.0, lambda_)
            pairs.append(Pair(f"tb_gae {label}, {shape}, actions only", peer_name, ours(every, decay), peer,
                              memory=False))
    return pairs


# -------------------------------------------------------------------------------------------------------- log-prob


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

    def ours(workspace: int) -> Run:
        return with_grads(lambda: linear_logprob(hidden, weight, targets, max_workspace_bytes=workspace)[0], hidden, weight)

    shape = f"{num_tokens}x{hidden_size}x{vocab}"
    scores_bytes = num_tokens * vocab * 4
    plain = with_grads(lambda: gathered(hidden @ weight.t()), hidden, weight)
    peers = [("product, log_softmax, gather", plain)]
    if hasattr(F, "linear_cross_entropy"):
        peers.append(("F.linear_cross_entropy", with_grads(
            lambda: -F.linear_cross_entropy(hidden, weight, targets, reduction="none"), hidden, weight)))
    liger = liger_linear(hidden, weight, targets)
    if liger is not None:
        peers.append(("Liger (its CPU form)", with_grads(liger, hidden, weight)))
    pairs = [Pair(f"logprob {shape}", "log_softmax, gather", with_grads(lambda: logprob(logits, targets)[0], logits),
                  with_grads(lambda: gathered(logits), logits))]
    for name, peer in peers:
        pairs.append(Pair(f"linear_logprob {shape}, 1/5 of the scores", name, ours(scores_bytes // 5), peer))
        pairs.append(Pair(f"linear_logprob {shape}, all scores", name, ours(scores_bytes), peer))
    return pairs


def liger_linear(hidden: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], Tensor] | None:
    """Liger's token log-prob, which falls back to torch on the CPU; None where it is not installed."""
    try:
        module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    except ImportError as error:
        print(f"Liger is left out: {error}", flush=True)
        return None
    return lambda: -module.LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets)


# -------------------------------------------------------------------------------------------------------- PPO loss


def ppo_pairs(num: int, impl: str = "auto") -> list[Pair]:
    old, advantages, returns, old_values = (torch.randn(num) for _ in range(4))
    new = (old + 0.1 * torch.randn(num)).requires_grad_()
    values = (old_values + 0.2 * torch.randn(num)).requires_grad_()
    mask = torch.rand(num) < 0.5

    def ours() -> tuple[Tensor, ...]:
        loss, _ = ppo_loss(new, old, advantages, mask, values=values, old_values=old_values, returns=returns,
                           num_tokens_global=num, impl=impl)
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


# --------------------------------------------------------------------------------------------------------- running


def all_pairs(small: bool) -> list[Pair]:
    if small:
        return [*gae_pairs(8, 256), *logprob_pairs(200, 32, 128), *ppo_pairs(20_000)]
    return [*gae_pairs(256, 4096), *logprob_pairs(2000, 128, 768), *logprob_pairs(2048, 256, 8192), *ppo_pairs(1 << 20)]


def measure(pair: Pair, repeats: int) -> dict[str, Any]:
    """One row of the table; the runs of ours and of the peer alternate, so a change of load meets both."""
    results, peaks = [], []
    for run in (pair.ours_run, pair.peer_run):
        with LiveBytes() if pair.memory else nullcontext() as live:
            results.append(run())
        peaks.append(live.peak if live is not None else None)
    for ours, peer in zip(*results, strict=True):
        torch.testing.assert_close(ours, peer, rtol=pair.tolerance, atol=pair.tolerance)
    ratios = sorted(1 / (processor_seconds(pair.ours_run) / processor_seconds(pair.peer_run)) for _ in range(repeats))
    return {"op": pair.name, "peer": pair.peer, "ratio": statistics.median(ratios), "lowest": ratios[0],
            "highest": ratios[-1], "rounds": repeats,
            "peak_share": peaks[0] / peaks[1] if pair.memory else None}


def processor_seconds(run: Run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def draw(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 0.3 * len(rows) + 1))
    ratios = [row["ratio"] for row in rows]
    spread = [[row["ratio"] - row["lowest"] for row in rows], [row["highest"] - row["ratio"] for row in rows]]
    axes.barh(range(len(rows)), [ratio - 1 for ratio in ratios], left=1.0, height=0.6,
              color=["tab:blue" if ratio >= 1 else "tab:orange" for ratio in ratios])
    axes.errorbar(ratios, range(len(rows)), xerr=spread, fmt="none", ecolor="black", capsize=2, linewidth=1)
    axes.set_xscale("log")
    ticks = [0.25, 0.5, 1, 2, 5, 10, 25]
    axes.set_xticks(ticks, [f"{tick}x" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", linewidth=0.4)
    axes.set_yticks(range(len(rows)), [f"{row['op']}  vs  {row['peer']}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("processor time, peer / ours, one thread: median, lowest and highest round")
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", help="also write the table to this file")
    parser.add_argument("--figure", help="also draw the ratios into this PNG file")
    parser.add_argument("--small", action="store_true", help="small shapes, a few seconds: checks that it runs")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of each pair")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    print(f"{'op':<56} {'peer':<30} {'peer/ours':>9}  {'lowest-highest':<15} {'peak memory':>11}")
    for pair in all_pairs(arguments.small):
        rows.append(row := measure(pair, arguments.repeats))
        share = "" if row["peak_share"] is None else f"{100 * row['peak_share']:.1f} %"
        print(f"{row['op']:<56} {row['peer']:<30} {row['ratio']:>8.2f}x  {row['lowest']:>6.2f}-{row['highest']:<8.2f} "
              f"{share:>11}", flush=True)
    if arguments.json:
        machine = {"torch": torch.__version__, "threads": 1, "python": platform.python_version()}
        Path(arguments.json).write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if arguments.figure:
        draw(rows, arguments.figure)


if __name__ == "__main__":
    main()
