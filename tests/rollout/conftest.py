"""One event loop and one warm pool of bubblewrap boxes for all rollout tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from sglang_helpers import sglang_engine

from megatron_rsi.rollout.engines.sglang import SGLangEngine
from megatron_rsi.sandbox import SandboxPool, SandboxSpec


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def pool(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxPool]:
    made = SandboxPool("bubblewrap", 4, SandboxSpec(memory_mb=256), tmp_path_factory.mktemp("scratch"))
    runner.run(made.__aenter__())
    yield made
    runner.run(made.close(drain_s=0.0))


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """One real server for all tests: its start is what costs."""
    engine = sglang_engine(tmp_path_factory.mktemp("sglang"))
    yield engine
    engine.close()
