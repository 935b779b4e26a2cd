"""Triton log-probs with the vocabulary over 2 and 4 gloo processes equal the float64 torch version of one process."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_rsi.kernels import linear_logprob, logprob

NUM_TOKENS, HIDDEN, VOCAB = 35, 8, 300


def problem(dtype):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=g)
    weight = torch.randn(VOCAB, HIDDEN, generator=g)
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=g)
    targets[3] = -100
    return hidden.to(dtype), weight.to(dtype), targets, torch.randn(2, NUM_TOKENS, generator=g).to(dtype)


def run(start, stop, group, impl, dtype):
    hidden, weight, targets, grads = problem(dtype)
    hidden.requires_grad_()
    shard = weight[start:stop].clone().requires_grad_()
    out = linear_logprob(hidden, shard, targets, temperature=0.7, entropy=True, vocab_start=start, group=group,
                         impl=impl)
    results = [*out, *torch.autograd.grad(out[0] @ grads[0] + out[1] @ grads[1], (hidden, shard))]
    logits = (hidden @ shard.t()).detach()
    logits[5, : max(0, 150 - start)] = -torch.inf  # the first rank of two has nothing finite in this row
    logits.requires_grad_()
    out = logprob(logits, torch.where(targets < 0, targets, targets % 150 + 150), entropy=True, vocab_start=start,
                  group=group, impl=impl)
    results += [*out, *torch.autograd.grad(out[0] @ grads[0] + out[1] @ grads[1], logits)]
    return [x.detach() for x in results]


def worker(rank, world, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    results = run(rank * VOCAB // world, (rank + 1) * VOCAB // world, dist.group.WORLD, "triton", torch.float32)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_parallel_equals_one_process(world, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (world, port, str(tmp_path)), nprocs=world)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    for k, expected in enumerate(run(0, VOCAB, None, "torch", torch.float64)):
        parts = [rank[k] for rank in ranks]
        if k in (3, 6):  # d weight by rows, d logits by columns
            parts = [torch.cat(parts, 0 if k == 3 else 1)]
        for got in parts:
            torch.testing.assert_close(got.double(), expected, rtol=5e-5, atol=5e-5)
