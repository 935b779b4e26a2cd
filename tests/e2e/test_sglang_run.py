"""The loop with the real SGLang as its engine, on a CPU: weights reach it after every update."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from e2e_helpers import finish, leftovers, start

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("VENV_SGLANG", ROOT / ".venv-sglang")) / "bin" / "python"


def need_sglang() -> None:
    if (PYTHON.parents[1] / ".installed").exists():
        return
    if os.environ.get("MEGATRON_RSI_REQUIRE_SGLANG") == "1":
        pytest.fail(f"MEGATRON_RSI_REQUIRE_SGLANG=1, but there is no {PYTHON}: bash scripts/sglang_cpu")
    pytest.skip(f"NOT TESTED with the real SGLang: no {PYTHON}; make it with: bash scripts/sglang_cpu")


@pytest.mark.sglang
def test_one_update_with_sglang_as_the_engine(base: Path, tmp_path: Path) -> None:
    need_sglang()
    scratch, folder = tmp_path / "scratch", tmp_path / "run"
    sizes = ("tasks.num_train=4", "tasks.num_validation=4", "tasks.num_core=2", "tasks.num_ladder=1", "tasks.num_long=1")
    small = ("rsr.num_tasks=2", "rpr.trajectories=4", "rpr.updates=1", "rpr.critic_rounds=0", "calibration.min_trials=1")
    engine = ("engine.kind=sglang", f"engine.python={PYTHON}", "engine.start_timeout_s=900")
    finish(start(scratch, "train", "--preset", "smoke", "--base", base, "--dir", folder, *sizes, *small, *engine))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (update,) = (r for r in records if r["kind"] == "step" and r["stage"] == "rpr-1")
    assert 0 < update["engine_gap_p99"] < 1e-3, "the trainer's log-probs of the tokens that SGLang sampled"
    trials = [json.loads(line) for p in folder.rglob("*.jsonl") for line in p.read_text().splitlines() if "attempt_id" in line]
    versions = {t["completion"]["weight_version"] for r in trials for t in r.get("turns", [])}
    assert len(versions) >= 4 and min(versions) >= 1, "every swap has its version"
    assert leftovers(scratch) == []
