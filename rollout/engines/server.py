"""An SGLang server as a child of this process: started, watched, and gone when this process is, however that ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from .base import EngineError

# Ends the server's whole process group when the trainer's end of the pipe closes, also by kill -9.
GUARD = """
import os, signal, subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def watch():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
code = server.wait()
os.killpg(0, signal.SIGKILL)
"""

# What SGLang needs to run without a GPU; [sglang] may override each.
CPU_OPTIONS: dict[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_cuda_graph": True,
    "disable_overlap_schedule": True, "mem_fraction_static": 0.05,
}  # fmt: skip
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}


def arguments(options: Mapping[str, Any]) -> list[str]:
    """
    >>> arguments({"tp_size": 2, "sleep_on_idle": True, "skip_server_warmup": False})
    ['--tp-size', '2', '--sleep-on-idle']
    """
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        elif isinstance(value, bool):
            words += [flag] * value
        elif value is not None:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """``start`` returns when the server answers; ``stop`` kills it with everything that it started."""

    def __init__(self, python: str | None, options: Mapping[str, Any], log: Path, *, cpu: bool, timeout_s: float):
        self.python, self.options, self.log = python or sys.executable, dict(options), log
        self.environment = os.environ | (CPU_ENVIRONMENT if cpu else {})
        self.timeout_s = timeout_s
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        self.stop()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        where = {"host": "127.0.0.1", "port": port}
        server = [self.python, "-m", "sglang.launch_server", *arguments(self.options | where)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", GUARD, *server], stdin=subprocess.PIPE, stdout=log, stderr=log,
                env=self.environment, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + self.timeout_s
        while not answers(self.url):
            if not self.alive:
                raise EngineError(f"the SGLang server ended while it started; {self.log} says:\n{self.last_words()}")
            if time.monotonic() > until:
                self.stop()
                raise EngineError(f"the SGLang server did not answer within {self.timeout_s:.0f} s; see {self.log}")
            time.sleep(0.2)

    def last_words(self, num_lines: int = 8) -> str:
        with self.log.open(errors="replace") as log:
            return "".join(deque(log, num_lines)).rstrip()

    def stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended, with its group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None


def answers(url: str, timeout_s: float = 5.0) -> bool:
    """SGLang samples a token to answer this, so it tells more than that a process is there."""
    try:
        return httpx2.get(f"{url}/health", timeout=timeout_s).status_code == 200
    except httpx2.TransportError:
        return False
