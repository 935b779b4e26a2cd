"""Tensor, pipeline and data parallel over two gloo processes equal one process: scores, loss, gradients, weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import parallel_worker
import pytest

from megatron_rsi.parallel import World, choose_device


@pytest.mark.timeout(420)
def test_two_processes_equal_one(tmp_path: Path) -> None:
    parallel_worker.reference(tmp_path, World.init(device="cpu"))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [parallel_worker.__file__, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "all layouts equal" in done.stdout


def test_world_of_one() -> None:
    world = World.init(device="cpu", seed=3)
    assert (world.tp, world.pp, world.dp, world.is_main, world.is_last_stage) == (1, 1, 1, True, True)
    assert world.all_reduce({"b": 2.0, "a": 1.0}) == {"a": 1.0, "b": 2.0}
    assert world.broadcast_object({"x": 1}) == {"x": 1} and world.all_gather_object(7) == [7]
    with pytest.raises(ValueError, match=r"1 processes .* tp\*pp = 2\*1"):
        World.init(tp=2, device="cpu")
    with pytest.raises(ValueError, match="unknown group 'xp'"):
        world.group("xp")


def test_device_is_chosen_in_one_place() -> None:
    assert choose_device("cpu")[1] == "gloo"
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        choose_device("tpu")
