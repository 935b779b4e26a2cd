"""The vocabulary split over 2 and 4 gloo processes gives the values and gradients of one process."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_rsi.kernels import linear_logprob, logprob

NUM_TOKENS, HIDDEN, VOCAB = 29, 8, 40


def problem():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=g, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64)
    weight[:10] -= 30 * hidden[0]  # a rank whose scores lie far below the others'
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=g)
    targets[3] = -100
    mask = torch.rand(NUM_TOKENS, generator=g) < 0.7
    return hidden, weight, targets, mask, torch.randn(2, NUM_TOKENS, generator=g, dtype=torch.float64)


def run(start, stop, group, workspace):
    """All results of this rank: linear_logprob (forward, d hidden, d weight), its unreduced d hidden, logprob."""
    hidden, weight, targets, mask, grads = problem()
    shard = weight[start:stop].clone()
    results = []
    for reduce_hidden_grad in (True, False):
        h, w = hidden.clone().requires_grad_(), shard.clone().requires_grad_()
        out = linear_logprob(h, w, targets, mask=mask, temperature=0.7, entropy=True, vocab_start=start, group=group,
                             reduce_hidden_grad=reduce_hidden_grad, max_workspace_bytes=workspace)
        results += [*out, *torch.autograd.grad(out[0] @ grads[0] + out[1] @ grads[1], (h, w))]
    for with_infinities in (False, True):
        logits = hidden @ shard.t()
        if with_infinities:
            logits[5, : max(0, 20 - start)] = -torch.inf  # with 2 ranks the first has nothing finite in row 5
        logits.requires_grad_()
        out = logprob(logits, torch.where(targets < 20, targets + 20, targets).masked_fill(targets == -100, -100),
                      entropy=True, vocab_start=start, group=group)
        results += [*out, *torch.autograd.grad(out[0] @ grads[0] + out[1] @ grads[1], logits)]
    return [x.detach() for x in results]


def worker(rank, world, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    start, stop = rank * VOCAB // world, (rank + 1) * VOCAB // world
    results = [run(start, stop, dist.group.WORLD, workspace) for workspace in (1 << 20, VOCAB * 8)]
    try:
        linear_logprob(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 999]), vocab_start=4 * rank,
                       group=dist.group.WORLD)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    torch.save((results, refusal), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_parallel_equals_one_process(world, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (world, port, str(tmp_path)), nprocs=world)
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    assert all("999 lies outside the vocabulary of every rank" in refusal for _, refusal in saved)
    expected = run(0, VOCAB, None, 1 << 20)
    assert all(x.isfinite().all() for x in expected)
    sharded = {3: 0, 7: 0, 10: 1, 13: 1}  # d weight by rows, d logits by columns
    for ranks in zip(*(results for results, _ in saved), strict=True):
        for k, want in enumerate(expected):
            parts = [rank[k] for rank in ranks]
            if k in sharded:
                parts = [torch.cat(parts, sharded[k])]
            elif k == 6:
                parts = [sum(parts)]  # reduce_hidden_grad=False leaves partial sums
            for got in parts:
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
