"""The same loop in two processes: data, tensor and pipeline parallel."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_helpers import consumed, finish, start


@pytest.mark.parametrize("layout", [(), ("world.tp=2",), ("world.pp=2",)], ids=["dp", "tp", "pp"])
def test_two_processes_run_the_loop(base: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    arguments = ("train", "--nproc", 2, "--preset", "smoke", "--base", base, "--dir", tmp_path / "run", *layout)
    output = finish(start(tmp_path / "scratch", *arguments))
    assert "rpr-1" in output
    steps = consumed(tmp_path / "run")
    rounds = [step for _, step in steps]  # how many critic rounds the gate asks for is the critic's affair
    assert rounds == [f"critic{n}" for n in range(len(rounds) - 2)] + ["update0", "update1"] and len(rounds) > 2
    assert all(len(ids) == len(set(ids)) == 8 for ids in steps.values())
