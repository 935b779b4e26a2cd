"""Triton kernels in the interpreter: run as TRITON_INTERPRET=1 pytest tests/kernels/interpret, its own process.

Triton decides when it is imported whether kernels are interpreted, and the other tests must not be. In any other
process these files are not collected; test_triton_processes.py starts this folder from the full test run.
"""

import os
import sys
from pathlib import Path

if os.environ.get("TRITON_INTERPRET") == "1":
    sys.path.insert(0, str(Path(__file__).parent))
    from bfloat16_interpreter import install

    install()
else:
    collect_ignore_glob = ["test_*.py"]
