"""What only SGLang has: swaps under running requests, a server that dies, proof that the weights arrived."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_helpers import model_config, weights
from safetensors.torch import save_file
from test_engine import log_softmax, reference, sampling

from megatron_rsi.rollout.engines import EngineError
from megatron_rsi.rollout.engines.buckets import BucketBuffer
from megatron_rsi.rollout.engines.sglang import Gone, SGLangEngine
from megatron_rsi.rollout.records import Completion

CONFIG = model_config()
LONG = dict(max_new_tokens=90, stop_ids=(), temperature=0.8)
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),  # for a hang: a restart takes seconds, on a busy machine minutes
]


@pytest.fixture()
def engine(sglang: SGLangEngine) -> Iterator[SGLangEngine]:
    sglang.load_weights(weights(CONFIG, 0).items(), 1)
    yield sglang
    sglang.settings = dataclasses.replace(sglang.settings, pause="retract")  # type: ignore[type-var]


def check_log_probs(prompt: list[int], completion: Completion, spans: list[Any], seeds: dict[int, int]) -> None:
    """Each span against a model with the weights of its version."""
    for start, end, version in spans:
        logp = log_softmax(reference(seed=seeds[version]), prompt + completion.ids, 0.8)[len(prompt) - 1 :]
        want = logp[torch.arange(start, end), completion.ids[start:end]]
        assert torch.allclose(torch.tensor(completion.logprobs[start:end]), want, atol=1e-4), (start, end, version)


@pytest.mark.parametrize("pause", ["retract", "abort", "in_place"])
def test_a_swap_during_running_requests(engine: SGLangEngine, pause: str) -> None:
    """All requests go on to their end, each token says by which weights it was sampled, and no new one sees the old cache."""
    engine.settings = dataclasses.replace(engine.settings, pause=pause)  # type: ignore[type-var]
    prompts = [[5, 6, n] for n in range(10, 16)]
    seeds = {1: 0}

    async def go() -> tuple[list[Completion], Completion]:
        tasks = [asyncio.create_task(engine.generate(p, sampling(**LONG), f"s{p[-1]}")) for p in prompts]
        while len(seeds) < 12 and not all(t.done() for t in tasks):  # again and again: one comes amid tokens at any speed
            await asyncio.sleep(0.2)
            version = max(seeds) + 1
            seeds[version] = version % 2
            await asyncio.to_thread(engine.load_weights, weights(CONFIG, version % 2).items(), version)
        new = await engine.generate(prompts[0], sampling(**LONG), "new")
        return await asyncio.gather(*tasks), new

    done, new = asyncio.run(go())
    assert all(c.finish == "length" and len(c.ids) == 90 for c in done)
    assert new.weight_version == max(seeds) and new.version_spans == []
    check_log_probs(prompts[0], new, [(0, 90, max(seeds))], seeds)
    for prompt, c in zip(prompts, done, strict=True):
        spans = [tuple(s) for s in c.version_spans] or [(0, 90, c.weight_version)]
        assert [s[0] for s in spans] == [0, *(s[1] for s in spans[:-1])] and spans[-1][1] == 90
        if pause == "in_place":  # the old cache is kept, so that what follows a swap is of a mixture
            spans = spans[:1]
        check_log_probs(prompt, c, spans, seeds)
    assert any(c.version_spans for c in done), "no swap came amid a request"


def test_the_server_is_killed_during_requests(engine: SGLangEngine) -> None:
    """It is started again once, with the weights that it had, and every request comes to its end."""
    before = engine.num_restarts

    async def go() -> list[Completion]:
        calls = [asyncio.create_task(engine.generate([5, 6, n], sampling(**LONG), f"s{n}")) for n in range(10, 14)]
        await asyncio.sleep(0.1)
        kill(engine)
        return await asyncio.gather(*calls)

    done = asyncio.run(go())
    assert engine.num_restarts == before + 1 and engine.health()
    for n, c in enumerate(done, start=10):
        assert c.weight_version == 1 and len(c.ids) == 90
        check_log_probs([5, 6, n], c, [(0, 90, 1)], {1: 0})


def test_the_server_is_killed_during_a_swap(engine: SGLangEngine) -> None:
    """The stream is taken to its end, as gathering is collective, and the new weights are put into a new server."""
    before, taken = engine.num_restarts, []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(CONFIG, 1).items():
            taken.append(name)
            if name == "model.layers.1.mlp.gate_proj.weight":
                kill(engine)
            yield name, tensor

    engine.load_weights(stream(), 2)
    assert taken == list(weights(CONFIG)) and engine.num_restarts == before + 1
    c = asyncio.run(engine.generate([5, 6, 7], sampling(**LONG), "s"))
    assert c.weight_version == 2
    check_log_probs([5, 6, 7], c, [(0, 90, 2)], {2: 1})


def kill(engine: SGLangEngine) -> None:
    """The scheduler, as the kernel's out-of-memory killer would: it is the largest of the group."""
    assert engine._server is not None and engine._server._process is not None
    group = engine._server._process.pid
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if os.getpgid(int(path.name)) == group:
                pages = int((path / "statm").read_text().split()[1])
                found.append((pages, int(path.name)))
    os.kill(max(found)[1], signal.SIGKILL)


def test_other_weights_than_were_sent_are_noticed(engine: SGLangEngine) -> None:
    engine._verify(engine._expected)
    assert set(engine._expected) >= {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"}
    with pytest.raises(Gone, match=r"checksums differ after the swap: model.norm.weight"):
        engine._verify(engine._expected | {"model.norm.weight": "0" * 16})
    with pytest.raises(Gone, match="model.new.weight"):
        engine._verify(engine._expected | {"model.new.weight": "0" * 16})


def test_sleep_is_refused_while_requests_run(engine: SGLangEngine) -> None:
    async def go() -> Completion:
        running = asyncio.create_task(engine.generate([5, 6], sampling(**LONG), "s"))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="cannot sleep while requests run"):
            engine.sleep()
        return await running

    assert asyncio.run(go()).weight_version == 1
    engine.flush()


def test_a_bad_request_is_the_callers_error_and_nobody_elses(engine: SGLangEngine) -> None:
    before = engine.num_restarts
    with pytest.raises(EngineError, match="SGLang refused /generate"):
        asyncio.run(engine._ask("/generate", {"input_ids": [1], "sampling_params": {"no_such": 1}}))
    assert engine.num_restarts == before and engine.health()


def test_scores_equal_transformers(engine: SGLangEngine) -> None:
    ids = list(range(10, 60))
    want = log_softmax(reference(), ids, 1.0)[range(49), ids[1:]]
    assert torch.allclose(torch.tensor(asyncio.run(engine.score(ids))), want, atol=1e-4)


@pytest.mark.parametrize("layout", ["world.tp=1", "world.tp=2", "world.pp=2"])
def test_log_probs_equal_the_trainers_after_a_swap(engine: SGLangEngine, tmp_path: Path, layout: str) -> None:
    """`doctor --parity` with trainers of every layout, attached to the server: gathered shards, checksums, log-probs."""
    save_file(weights(CONFIG, 2), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", layout[-1]]
    command += ["-m", "megatron_rsi", "doctor", "--parity", str(tmp_path), "world.device=cpu", layout]
    command += ["engine.kind=sglang", f'engine.urls=["{engine.url}"]', "engine.context=128", "engine.max_new_tokens=24"]
    output = tmp_path / "output"  # no pipe: torch's manager of shared memory inherits it and lives as long as the server
    with output.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    text = output.read_text()
    assert done.returncode == 0, text[-3000:]
    assert re.search(r"^ok +parity +sglang against trainer", text, re.MULTILINE), text


def test_buckets_are_bounded_and_hold_every_byte() -> None:
    tensors = weights(CONFIG, 3)
    buffer = BucketBuffer(4 << 10, torch.float32, torch.device("cpu"))
    back: dict[str, Any] = {}
    sizes = []
    for bucket in buffer.fill(tensors.items()):
        sizes.append(bucket.flat.numel())
        for entry in bucket.entries:
            part = bucket.flat[entry.start_idx : entry.end_idx].clone()
            back[entry.name] = part.view(entry.dtype).view(entry.shape)
        assert bucket.flat.numel() <= 4 << 10 or len(bucket.entries) == 1
    assert list(back) == list(tensors) and all(torch.equal(back[n], tensors[n]) for n in tensors)
    assert len(sizes) > 5 and max(sizes) <= max(4 << 10, *(4 * t.numel() for t in tensors.values()))
