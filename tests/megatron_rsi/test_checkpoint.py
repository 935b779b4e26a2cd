"""Checkpoints are whole or not there; Hugging Face folders go both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from policy_helpers import batch_of, biggest_difference, config, step, tensors
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from megatron_rsi import checkpoint
from megatron_rsi.critic import build_critic, inherit
from megatron_rsi.parallel import World
from megatron_rsi.policy import Policy
from megatron_rsi.weights import random_tensors


@pytest.fixture(scope="module")
def world() -> World:
    return World.init(device="cpu")


def make(world: World, tied: bool = False) -> Policy:
    policy = Policy(config(tied), world)
    policy.load_hf(random_tensors(config(tied), seed=2, std=0.1))
    return policy


def test_saved_state_resumes_to_the_bit(world: World, tmp_path: Path) -> None:
    policy, batches = make(world), [batch_of([0, 1])]
    step(policy, batches, lr=1e-3)
    path = checkpoint.save(
        tmp_path, world, 7, {"actor": policy.state_dict(), "rng": torch.get_rng_state(), "n": [1, 2]}
    )
    assert checkpoint.latest(tmp_path) == path and path.name == "step_00000007"
    step(policy, batches, lr=1e-3)
    state = checkpoint.load(path, world)
    assert state["n"] == [1, 2]
    resumed = make(world)
    resumed.load_state_dict(state["actor"])
    step(resumed, batches, lr=1e-3)
    assert policy.weights_hash() == resumed.weights_hash()


def test_torn_checkpoints_are_never_loaded_and_the_newest_are_kept(world: World, tmp_path: Path) -> None:
    for number in range(4):
        checkpoint.save(tmp_path, world, number, {"n": number}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    newest = tmp_path / "step_00000003"
    (newest / "DONE").unlink()  # killed before the marker
    leftover = tmp_path / ".tmp-step_00000009"
    leftover.mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000002"
    with pytest.raises(ValueError, match="step_00000003 is not a complete checkpoint"):
        checkpoint.load(newest, world)
    checkpoint.save(tmp_path, world, 4, {"n": 4}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]
    file = tmp_path / "step_00000004" / "rank_00000.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="rank_00000.pt is damaged"):
        checkpoint.load(tmp_path / "step_00000004", world)
    file.unlink()
    with pytest.raises(ValueError, match="lacks rank_00000.pt"):
        checkpoint.load(tmp_path / "step_00000004", world)
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_a_full_disk_leaves_the_old_checkpoint(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is the kernel's own: files of this process may not grow beyond a limit."""
    import resource
    import signal

    policy = make(world)
    first = checkpoint.save(tmp_path / "states", world, 1, {"actor": policy.state_dict()})
    exported = checkpoint.export_hf(policy, tmp_path / "hf")
    digest = policy.weights_hash()
    step(policy, [batch_of([0])], lr=1e-2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(OSError, match="checkpoint not written"):
            checkpoint.save(tmp_path / "states", world, 2, {"actor": policy.state_dict()})
        with pytest.raises(OSError, match="checkpoint not written"):
            checkpoint.export_hf(policy, exported)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in (tmp_path / "states").iterdir()] == [first.name]
    again = make(world)
    again.load_state_dict(checkpoint.load(first, world)["actor"])
    assert again.weights_hash() == digest
    again.load_hf(checkpoint.load_hf_dir(exported)[1])
    assert again.weights_hash() == digest
    assert {p.name for p in tmp_path.iterdir()} == {"states", "hf"}


def test_another_layout_is_refused_with_both_numbers(world: World, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, world, 1, {})
    (path / "layout.json").write_text(json.dumps({"size": 4, "tp": 2, "pp": 1}))
    with pytest.raises(ValueError, match="4 processes with tp=2 pp=1, this run has 1 processes with tp=1 pp=1"):
        checkpoint.load(path, world)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        checkpoint.save(tmp_path, world, 2, {}, keep=0)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_the_export(world: World, tmp_path: Path, tied: bool) -> None:
    policy, extra = make(world, tied), tmp_path / "tokenizer.json"
    extra.write_text("{}")
    folder = checkpoint.export_hf(policy, tmp_path / "hf", [extra])
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = batch_of([1])
    with torch.no_grad():
        scores = model(batch.tokens[None]).logits[0].log_softmax(-1)
    index = batch.action_index
    want = scores[index - 1, batch.tokens[index]]
    assert (policy.logprobs([batch])[0][index] - want).abs().max() < 1e-5
    shape, read = checkpoint.load_hf_dir(folder)
    assert shape == policy.config and biggest_difference(read, tensors(policy)) == 0.0
    checkpoint.export_hf(policy, folder)  # replaces the whole folder
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_critic_keeps_its_head(world: World, tmp_path: Path) -> None:
    actor = make(world, tied=True)
    critic = build_critic(config(tied=True), world, actor.hf_tensors())
    batch = batch_of([0, 1, 2])
    for _ in range(3):
        step(critic, [batch], lr=1e-3)
    folder = checkpoint.export_hf(critic, tmp_path / "critic")
    shape, read = checkpoint.load_hf_dir(folder)
    child = inherit(shape, world, read)
    assert torch.equal(child.values([batch])[0], critic.values([batch])[0])
    assert child.values([batch])[0].abs().max() > 0 and child.num_steps == 0
    with pytest.raises(ValueError, match=r"lacks value_head.weight, value_head.bias"):
        inherit(shape, world, actor.hf_tensors())


def test_hugging_face_folders_sharded_and_broken(world: World, tmp_path: Path) -> None:
    given = dict(random_tensors(config(), seed=2))
    names = list(given)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({n: given[n] for n in part}, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(config().to_hf()))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {n: f for f, part in files.items() for n in part}}))
    shape, read = checkpoint.load_hf_dir(tmp_path)
    assert shape == config() and biggest_difference(read, given) == 0.0
    index.write_text(
        json.dumps({"weight_map": {n: f for f, part in files.items() for n in part} | {"x": "a.safetensors"}})
    )
    with pytest.raises(ValueError, match="do not hold: x"):
        checkpoint.load_hf_dir(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"garbage")
    with pytest.raises(ValueError, match="b.safetensors is damaged"):
        checkpoint.load_hf_dir(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match="missing weight file .*b.safetensors"):
        checkpoint.load_hf_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not the configuration of a model"):
        checkpoint.load_hf_dir(tmp_path)
    with pytest.raises(ValueError, match="no config.json"):
        checkpoint.load_hf_dir(tmp_path / "absent")


def test_tensors_come_in_the_order_in_which_a_policy_streams_them(world: World, tmp_path: Path) -> None:
    """An engine that joins q, k and v compares a checksum over their bytes in turn; a file keeps names in another order."""
    actor = make(world)
    checkpoint.export_hf(actor, tmp_path / "actor")
    assert list(checkpoint.load_hf_dir(tmp_path / "actor")[1]) == [name for name, _ in actor.hf_tensors()]
