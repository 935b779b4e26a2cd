"""Started by test_parallel_equality.py: one process writes the reference, two processes check every layout against it.

torchrun --standalone --nproc-per-node 2 tests/megatron_rsi/parallel_worker.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from policy_helpers import (
    OPTIMIZER,
    batch_of,
    biggest_difference,
    config,
    head,
    step,
    tensors,
)

from megatron_rsi import checkpoint
from megatron_rsi.batch import split_dp, whiten
from megatron_rsi.critic import inherit
from megatron_rsi.parallel import World
from megatron_rsi.policy import OptimizerConfig, Policy
from megatron_rsi.weights import random_tensors

GROUPS = [[0, 3], [1], [2, 4, 5]]  # micro-batches of different sizes
KINDS = ("untied", "tied", "critic", "clipped")
TOLERANCE = 1e-5
LR = 0.1  # with OPTIMIZER's eps of 0.1 a weight moves by about as much as its gradient, and so does its rounding


def make(kind: str, world: World, optimizer: OptimizerConfig = OPTIMIZER) -> Policy:
    if kind == "critic":
        shape = config(tied=True)
        return inherit(shape, world, [*random_tensors(shape, seed=3, std=0.15), *head().items()], optimizer)
    if kind == "clipped":
        optimizer = OptimizerConfig(eps=0.1, clip_grad=0.05)
    shape = config(tied=kind == "tied")
    policy = Policy(shape, world, optimizer)
    policy.load_hf(random_tensors(shape, seed=3, std=0.15))
    return policy


def scores(policy: Policy) -> list[torch.Tensor]:
    batches = [batch_of(g) for g in GROUPS]
    if policy.value_head:
        return policy.values(batches)
    return [t for pair in policy.logprobs(batches, 0.8, entropy=True) for t in pair]


def trace(kind: str, world: World) -> dict:
    """All that must not depend on the layout. Data-parallel ranks get unequal shares."""
    policy = make(kind, world)
    loaded, digest = tensors(policy), policy.weights_hash()
    before = scores(policy)
    shares = (
        [[batch_of(g) for g in GROUPS]]
        if world.dp == 1
        else [[batch_of(GROUPS[1]), batch_of(GROUPS[2])], [batch_of(GROUPS[0])]]
    )
    metrics = [step(policy, shares[world.dp_rank], LR) for _ in range(2)]
    return {"loaded": loaded, "digest": digest, "before": before, "metrics": metrics, "after": tensors(policy)}


def check(kind: str, world: World, reference: dict) -> None:
    got, want = trace(kind, world), reference[kind]
    label = f"{kind} tp={world.tp} pp={world.pp} dp={world.dp}"
    for name, tensor in want["loaded"].items():
        assert torch.equal(got["loaded"][name], tensor), f"{label}: {name} is not bitwise what was loaded"
    assert got["digest"] == want["digest"], label
    for a, b in zip(got["before"], want["before"], strict=True):
        assert torch.allclose(a, b, atol=TOLERANCE), f"{label}: scores differ by {(a - b).abs().max()}"
    for a, b in zip(got["metrics"], want["metrics"], strict=True):
        for name, value in b.items():
            assert abs(a[name] - value) <= TOLERANCE * max(1, abs(value)), f"{label}: {name} {a[name]} != {value}"
    difference = biggest_difference(got["after"], want["after"])
    moved = biggest_difference(want["loaded"], want["after"])
    assert difference <= TOLERANCE < moved / 50, f"{label}: weights differ by {difference} of {moved}"


def check_data_parallel(world: World) -> None:
    """An empty rank neither hangs nor changes anything; sharded whitening equals the whole; the policy evens counts."""
    mine = [batch_of(g) for g in GROUPS] if world.dp_rank == 0 else []
    policy = make("untied", world)
    whole = step(policy, mine)
    shares = split_dp([batch_of(g) for g in GROUPS], world.dp)
    assert sorted(map(len, shares)) == [1, 2]
    split = step(make("untied", world), shares[world.dp_rank])
    assert abs(whole["loss"] - split["loss"]) < 1e-6 and abs(whole["grad_norm"] - split["grad_norm"]) < 1e-5
    everything = [batch_of(g) for g in GROUPS]
    alone = whiten([b.advantages for b in everything], [b.mask for b in everything])
    sharded = whiten([b.advantages for b in mine], [b.mask for b in mine], world)
    assert len(sharded) == len(mine)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(sharded, alone, strict=False))


def check_optimizers(world: World, reference: dict) -> None:
    """Muon over two data-parallel ranks, and the distributed optimizer, move weights as one process does."""
    shares = [[batch_of(GROUPS[0])], [batch_of(GROUPS[1]), batch_of(GROUPS[2])]]
    for name, optimizer in (("muon", MUON), ("untied", OptimizerConfig(eps=0.1, clip_grad=0.0, distributed=True))):
        policy = make("untied", world, optimizer)
        for _ in range(2):
            step(policy, shares[world.dp_rank], lr=LR if name == "untied" else 0.01)
        difference = biggest_difference(tensors(policy), reference[name]["after"])
        assert difference <= (TOLERANCE if name == "untied" else 2e-3), f"{name}: {difference}"


MUON = OptimizerConfig(kind="muon", muon_lr_ratio=2.0, clip_grad=0.0, eps=0.1)


def check_refusals(world: World) -> None:
    if world.tp == 2:
        try:
            Policy(config(), world, MUON)
        except ValueError as error:
            assert "world.tp=1" in str(error)
        else:
            raise AssertionError("muon at tp=2 was accepted")
    try:
        World.init(tp=3, device="cpu")
    except ValueError as error:
        assert "2 processes" in str(error) and "3*1" in str(error)
    else:
        raise AssertionError("tp=3 with 2 processes was accepted")


def check_checkpoint(world: World, folder: Path) -> None:
    """Save, train on; load, train on: the same weights. Another layout and a missing rank file are refused."""
    name = folder / f"checkpoints_tp{world.tp}_pp{world.pp}"
    policy = make("untied", world)
    batches = [batch_of(g) for g in GROUPS]
    step(policy, batches)
    path = checkpoint.save(name, world, 1, {"actor": policy.state_dict()})
    step(policy, batches)
    resumed = make("untied", world)
    resumed.load_state_dict(checkpoint.load(path, world)["actor"])
    assert resumed.num_steps == 1
    step(resumed, batches)
    assert policy.weights_hash() == resumed.weights_hash()
    exported = checkpoint.export_hf(policy, folder / f"hf_tp{world.tp}_pp{world.pp}")
    world.barrier()
    shape, read = checkpoint.load_hf_dir(exported)
    assert shape == policy.config and biggest_difference(read, tensors(policy)) == 0.0


def check_layout_refused(world: World, folder: Path) -> None:
    try:
        checkpoint.load(folder / "checkpoints_tp2_pp1" / "step_00000001", world)
    except ValueError as error:
        assert "tp=2 pp=1" in str(error) and "tp=1 pp=2" in str(error), error
    else:
        raise AssertionError("a checkpoint of another layout was loaded")


def check_full_disk(world: World, folder: Path) -> None:
    """One rank cannot write: every rank gets the error, the older checkpoint stays the newest."""
    name = folder / "full"
    first = checkpoint.save(name, world, 1, {"a": 1})
    state = {"a": Unwritable() if world.rank == 1 else 1}
    try:
        checkpoint.save(name, world, 2, state)
    except OSError as error:
        assert "rank 1" in str(error) and "No space left" in str(error)
    else:
        raise AssertionError("a failed write went unnoticed")
    world.barrier()
    assert checkpoint.latest(name) == first and [p.name for p in name.iterdir()] == [first.name]


class Unwritable:
    def __reduce__(self) -> tuple:
        raise OSError(28, "No space left on device")


def reference(folder: Path, world: World) -> None:
    result = {kind: trace(kind, world) for kind in KINDS}
    muon = make("untied", world, MUON)
    for _ in range(2):
        step(muon, [batch_of(g) for g in GROUPS], lr=0.01)
    torch.save(result | {"muon": {"after": tensors(muon)}}, folder / "reference.pt")


def main() -> None:
    folder = Path(sys.argv[1])
    wanted = torch.load(folder / "reference.pt", weights_only=False)
    for tp, pp in ((2, 1), (1, 2), (1, 1)):
        world = World.init(tp, pp, device="cpu")
        for kind in KINDS:
            check(kind, world, wanted)
        check_refusals(world)
        world = World.init(tp, pp, device="cpu")
        check_checkpoint(world, folder)
        if pp == 2:
            check_layout_refused(world, folder)
        if world.dp == 2:
            check_data_parallel(world)
            check_optimizers(world, wanted)
            check_full_disk(world, folder)
    if world.is_main:
        print("all layouts equal")
    world.close()


if __name__ == "__main__":
    main()
