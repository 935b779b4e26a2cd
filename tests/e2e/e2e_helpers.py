"""Runs of the real command line and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "megatron_rsi", *map(str, arguments)]


def start(scratch: Path, *arguments: object) -> subprocess.Popen[str]:
    """A training run in its own process group, with its own folder for sandboxes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    scratch.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        command(*arguments), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 900.0) -> str:
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output[-3000:]
    return output


def kill_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def signal_run(folder: Path, number: int) -> int:
    """Sends a signal to every process whose command line names the run folder: launcher and workers. Their number."""
    sent = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (process / "cmdline").read_bytes().decode(errors="replace").split("\0"):
                os.kill(int(process.name), number)
                sent += 1
        except (OSError, ProcessLookupError):
            continue
    return sent


def record_files(folder: Path) -> list[Path]:
    """The .jsonl files of a run. os.walk, unlike rglob, does not mind folders that come and go meanwhile."""
    return [Path(at) / name for at, _, names in os.walk(folder) for name in names if name.endswith(".jsonl")]


def attempt_ids(folder: Path) -> Counter[str]:
    """How often each attempt stands in the files of a run."""
    lines = (line for path in record_files(folder) for line in path.read_bytes().split(b"\n")[:-1])
    records = (json.loads(line) for line in lines)
    return Counter(r["attempt_id"] for r in records if "attempt_id" in r)


def consumed(folder: Path) -> dict[tuple[str, str], list[str]]:
    """The attempts that each critic round and update trained on; a step done again after a crash counts once, last."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(r["stage"], r["step"]): r["ids"] for r in records if r["kind"] == "consumed"}


def leftovers(scratch: Path) -> list[str]:
    """Processes, mounts and folders of sandboxes under ``scratch``."""
    found = [str(p) for p in scratch.rglob("*") if p.is_dir() and p.name.startswith(("box", "run"))]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if str(scratch) in text:
            found.append(f"process {process.name}: {text[:200]}")
    return found + [line for line in Path("/proc/mounts").read_text().splitlines() if str(scratch) in line]
