"""A base that is trained once a session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs: the limit is for a hang, not for a slow machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that solves a few tasks, so that every stage has something to work on."""
    folder = tmp_path_factory.mktemp("base")
    script = (
        "import sys; from pathlib import Path; from megatron_rsi.base import make_base; from megatron_rsi.config import load;"
        "from megatron_rsi.parallel import World;"
        "make_base(load('smoke', []), World.init(device='cpu'), Path(sys.argv[1]), lambda *_: None)"
    )
    subprocess.run([sys.executable, "-c", script, str(folder / "base")], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return folder / "base"
