"""Offline compilation: run as KERNELS_COMPILE=1 pytest tests/kernels/compile, its own process.

It replaces Triton's driver by a stand-in, which no other test may see, and cannot share a process with the interpreter.
In any other process these files are not collected; test_triton_processes.py starts this folder from the full test run.
"""

import os
import sys
from pathlib import Path

if os.environ.get("KERNELS_COMPILE") == "1" and os.environ.get("TRITON_INTERPRET") != "1":
    sys.path.insert(0, str(Path(__file__).parent))
else:
    collect_ignore_glob = ["test_*.py"]
