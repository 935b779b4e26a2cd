"""Interpreting and compiling Triton kernels need a process each: this starts both from the full test run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1200)  # compiling 80 kernels on a busy core takes minutes the first time
@pytest.mark.parametrize("folder,interpret", [("interpret", "1"), ("compile", "0")])
def test_in_its_own_process(folder, interpret):
    pytest.importorskip("triton")
    path = Path(__file__).parent / folder
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", str(path)], capture_output=True, text=True,
                         env={**os.environ, "TRITON_INTERPRET": interpret, "KERNELS_COMPILE": str(1 - int(interpret))})
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
