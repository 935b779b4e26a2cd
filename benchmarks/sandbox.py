"""Latency of sandboxes against the plain tools, and a stress of many boxes at once.

    python -m benchmarks.sandbox --json out.json --figure out.png            # both back ends where there is a daemon
    python -m benchmarks.sandbox --stress 200 --docker-stress 60             # zero lost, zero wrong, or exit code 1

Latency: start of a box, one command in its shell, and becoming new again; beside them `bash -c` on this machine and
`docker exec` of the docker program into a container, in turns, so that other load strikes all alike. Stress: every box
runs 20 commands, some of which hang, fork without end, fill the disk, eat memory or kill their own shell. A box that a
command took down, or that was not as told, is counted as lost or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megatron_rsi.sandbox import SandboxError, SandboxPool, SandboxSpec, make_sandbox

SPEC = SandboxSpec(memory_mb=64, max_processes=32, disk_mb=8)
TROUBLE = {  # command -> what its result must satisfy, besides that the box answers the next command
    "sleep 60": lambda r: r.timed_out and r.exit_code == 124,
    "f() { f | f & }; f; sleep 60": lambda r: r.timed_out,
    "head -c 100000000 /dev/zero > full; stat -c %s full": lambda r: int(r.stdout.split()[-1]) <= 8 << 20,
    "python3 -c 'bytearray(400 << 20)'": lambda r: r.exit_code != 0,
    "kill -9 $$": lambda r: r.exit_code == 137,
}
NUM_COMMANDS = 20
TIMEOUT_S = 20.0  # of ordinary commands: many boxes share few cores
HANG_TIMEOUT_S = 1.0


async def seconds(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def latency(kinds: list[str], repeats: int, scratch: str) -> dict[str, list[float]]:
    """Name -> seconds of each repetition."""
    boxes = {kind: await make_sandbox(kind, SPEC, scratch) for kind in kinds}
    found: dict[str, list[float]] = {}

    async def note(name: str, work: Callable[[], Awaitable[Any]]) -> None:
        found.setdefault(name, []).append(await seconds(work))

    async def start_and_close(kind: str) -> None:
        began = time.perf_counter()
        box = await make_sandbox(kind, SPEC, scratch)
        found.setdefault(f"{kind} start", []).append(time.perf_counter() - began)
        await box.close()

    for number in range(repeats):
        await note("bash -c", lambda: asyncio.to_thread(subprocess.run, ["bash", "-c", "/bin/true"], check=True))
        for kind, box in boxes.items():
            await note(f"{kind} command", lambda box=box: box.exec("/bin/true", timeout_s=TIMEOUT_S))
            if number < repeats // 4:
                await note(f"{kind} reset", box.reset)
                await start_and_close(kind)
            if kind == "docker":
                argv = ["docker", "exec", box.name, "bash", "-c", "/bin/true"]  # type: ignore[attr-defined]
                await note("docker exec", lambda argv=argv: asyncio.to_thread(subprocess.run, argv, check=True))
    for box in boxes.values():
        await box.close()
    return found


def table(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Median, p99 and the ratio to the plain tool of the same kind of work."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    rows = []
    for name, values in found.items():
        peer = "docker exec" if name.startswith("docker ") and "docker exec" in found else "bash -c"
        p99 = sorted(values)[min(len(values) - 1, round(0.99 * (len(values) - 1)))]
        rows.append({"name": name, "n": len(values), "median_s": medians[name], "p99_s": p99,
                     "peer": peer, "ratio": medians[name] / medians[peer]})  # fmt: skip
    return rows


async def stress(kind: str, num_boxes: int, scratch: str) -> dict[str, Any]:
    """``num_boxes`` boxes alive at once, ``NUM_COMMANDS`` commands each."""
    counts: Counter[str] = Counter()
    times: list[float] = []
    all_started = asyncio.Barrier(num_boxes)

    async def trial(pool: SandboxPool, number: int) -> None:
        try:
            async with pool.lease() as box:
                await all_started.wait()
                for step in range(NUM_COMMANDS):
                    counts[await _step(box, number, step, times)] += 1
        except SandboxError as error:
            counts["lost"] += 1
            print(f"lost: {error}", file=sys.stderr)

    began = time.perf_counter()
    async with SandboxPool(kind, num_boxes, SPEC, scratch) as pool:
        await asyncio.gather(*(trial(pool, number) for number in range(num_boxes)))
    return {
        "kind": kind, "boxes": num_boxes, "commands": sum(counts.values()), "right": counts["right"],
        "wrong": counts["wrong"], "lost": counts["lost"] + num_boxes * NUM_COMMANDS - sum(counts.values()),
        "left_behind": len(list(Path(scratch).glob("run-*"))), "wall_s": time.perf_counter() - began,
        "command_median_s": statistics.median(times), "command_p99_s": sorted(times)[int(0.99 * (len(times) - 1))],
    }  # fmt: skip


async def _step(box: Any, number: int, step: int, times: list[float]) -> str:
    troubles = list(TROUBLE.items())
    if step % 4 == 3:  # a quarter of the commands
        command, is_right = troubles[(number + step // 4) % len(troubles)]
        result = await box.exec(command, timeout_s=HANG_TIMEOUT_S if "60" in command else TIMEOUT_S)
        await box.run(["rm", "-f", "/app/full"], timeout_s=TIMEOUT_S)
        right = is_right(result)
    else:
        began = time.perf_counter()
        result = await box.exec(f"echo {number}-{step}", timeout_s=TIMEOUT_S)
        times.append(time.perf_counter() - began)
        right = (result.stdout, result.exit_code) == (f"{number}-{step}\n", 0)
    if not right:
        print(f"wrong: step {step} of box {number}: {result}", file=sys.stderr)
    return "right" if right else "wrong"


def draw(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.4 * len(rows) + 1))
    axes.barh(range(len(rows)), [row["ratio"] for row in rows], height=0.6)
    axes.set_yticks(range(len(rows)), [f"{row['name']}  /  {row['peer']}" for row in rows])
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("median time, relative to the plain tool in the same run")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=100, help="commands of each kind; starts and resets a quarter")
    parser.add_argument("--stress", type=int, default=0, help="bubblewrap boxes at once")
    parser.add_argument("--docker-stress", type=int, default=0, help="containers at once")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--figure", help="also draw the ratios into this PNG file")
    arguments = parser.parse_args()
    kinds = ["bubblewrap", *(["docker"] if os.environ.get("DOCKER_HOST") else [])]
    with tempfile.TemporaryDirectory() as scratch:
        rows = table(asyncio.run(latency(kinds, arguments.repeats, scratch)))
        for row in rows:
            print(f"{row['name']:<20} median {1000 * row['median_s']:8.2f} ms  p99 {1000 * row['p99_s']:8.2f} ms  "
                  f"{row['ratio']:7.2f} x {row['peer']}")  # fmt: skip
        jobs = [("bubblewrap", arguments.stress), ("docker", arguments.docker_stress)]
        stressed = [asyncio.run(stress(kind, number, scratch)) for kind, number in jobs if number]
    for result in stressed:
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"latency": rows, "stress": stressed}, indent=1) + "\n")
    if arguments.figure:
        draw(rows, arguments.figure)
    if any(result["wrong"] or result["lost"] or result["left_behind"] for result in stressed):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
