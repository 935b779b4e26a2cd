"""The loop with ``sandbox.kind=docker`` against a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from e2e_helpers import attempt_ids, command, finish, start

from megatron_rsi.sandbox import SandboxError


def need_docker() -> None:
    from megatron_rsi.sandbox.docker import _client

    try:
        _client(os.environ.get("DOCKER_HOST", ""))
    except SandboxError as error:
        if os.environ.get("MEGATRON_RSI_REQUIRE_DOCKER") == "1":
            pytest.fail(f"MEGATRON_RSI_REQUIRE_DOCKER=1, but {error}")
        pytest.skip(str(error))


def test_tasks_and_a_small_run_in_containers(base: Path, tmp_path: Path) -> None:
    need_docker()
    sizes = ("tasks.num_train=4", "tasks.num_validation=4", "tasks.num_core=2", "tasks.num_ladder=1", "tasks.num_long=1")
    suites = tmp_path / "suites"
    subprocess.run(command("tasks", "generate", suites, "--preset", "smoke", *sizes), check=True, capture_output=True)
    checked = subprocess.run(command("tasks", "check", suites / "core", "--sandbox", "docker"), capture_output=True, text=True)
    assert "2 of 2 tasks are good" in checked.stdout, checked.stdout + checked.stderr

    small = ("rsr.num_tasks=2", "rpr.trajectories=4", "rpr.updates=1", "sandbox.pool_size=2", "sandbox.kind=docker")
    folder = tmp_path / "run"
    finish(start(tmp_path / "scratch", "train", "--preset", "smoke", "--base", base, "--dir", folder, *sizes, *small))
    assert [s["name"] for s in json.loads((folder / "results.json").read_text())["stages"]] == ["base", "rsr-1", "rpr-1"]
    records = [json.loads(line) for p in folder.rglob("*.jsonl") for line in p.read_text().splitlines()]
    trials = [r for r in records if "attempt_id" in r]
    assert len(trials) == len(attempt_ids(folder)) and all(r["verdict"].get("error") is None for r in trials)
    listed = subprocess.run(
        ["docker", "ps", "-aq", "--filter", "label=megatron-rsi.run"], capture_output=True, text=True, check=False
    )
    assert listed.stdout.strip() == ""
