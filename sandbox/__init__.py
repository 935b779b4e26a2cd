"""Places where an agent's commands run: bubblewrap boxes and Docker containers behind one protocol."""

from __future__ import annotations

from .base import ExecResult, Sandbox, SandboxError, SandboxSpec, Snapshot
from .bubblewrap import BubblewrapSandbox
from .cleanup import SweepReport, default_scratch, sweep
from .pool import SandboxPool, make_sandbox

__all__ = [
    "BubblewrapSandbox",
    "ExecResult",
    "Sandbox",
    "SandboxError",
    "SandboxPool",
    "SandboxSpec",
    "Snapshot",
    "SweepReport",
    "default_scratch",
    "make_sandbox",
    "sweep",
]
