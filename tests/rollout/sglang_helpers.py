"""The real SGLang server for tests: its environment, and one engine of a tiny model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rollout_helpers import model_config

from megatron_rsi.rollout.engines.sglang import SGLangEngine
from megatron_rsi.settings import Engine

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("VENV_SGLANG", ROOT / ".venv-sglang")) / "bin" / "python"


def need_sglang() -> str:
    """The interpreter that has SGLang. Where ``scripts/test`` has built it, its absence is a failure."""
    if (PYTHON.parents[1] / ".installed").exists():
        return str(PYTHON)
    if os.environ.get("MEGATRON_RSI_REQUIRE_SGLANG") == "1":
        pytest.fail(f"MEGATRON_RSI_REQUIRE_SGLANG=1, but there is no {PYTHON}: bash scripts/sglang_cpu")
    pytest.skip(f"NOT TESTED against the real SGLang: no {PYTHON}; make it with: bash scripts/sglang_cpu")


def sglang_engine(folder: Path) -> SGLangEngine:
    settings = Engine(kind="sglang", python=need_sglang(), max_batch=8, max_new_tokens=24, context=128, bucket_mb=1)
    engine = SGLangEngine(settings, model_config().to_hf(), "cpu", folder)
    engine._buffer.size_bytes = 16 << 10  # many buckets, though the model is small
    return engine
