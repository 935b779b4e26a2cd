"""Sandboxes out of Docker containers: any image that has python3 and bash.

The same supervisor as everywhere is the container's process 1, spoken to over the attached standard input. When the
host's end of that goes away, even by kill -9, the supervisor ends, and the container is removed by the daemon.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
import time
from math import ceil
from pathlib import Path
from typing import Any

from .base import SandboxError, SandboxSpec, Snapshot
from .channel import BASE_ENV, BOOTSTRAP, Channel, SupervisedSandbox
from .cleanup import Run

DEFAULT_IMAGE = "megatron-rsi-base:latest"
RUN_LABEL = "megatron-rsi.run"
OWNER_LABEL = "megatron-rsi.owner"
START_TIMEOUT_S = 60.0
# What root inside needs to install packages and to own files of several users. No raw sockets, no devices, no tracing.
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]
SUPERVISOR_MEMORY_BYTES = 32 << 20
SUPERVISOR_PROCESSES = 2
HOW_TO_START = "start one with: scripts/docker_daemon start /tmp/megatron-rsi-docker, and set DOCKER_HOST as it prints"

_numbers = itertools.count()
_clients: dict[str, Any] = {}
_clients_lock = threading.Lock()


def _client(host: str) -> Any:
    """A docker-py client for ``host`` ("" means docker-py's defaults), one for the whole process."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise SandboxError("docker-py is not installed: pip install docker") from error
    with _clients_lock:
        if host not in _clients:
            environment = {**os.environ, "DOCKER_HOST": host} if host else dict(os.environ)
            try:
                _clients[host] = docker.from_env(environment=environment, timeout=START_TIMEOUT_S).api
            except (DockerException, OSError) as error:
                raise SandboxError(
                    f"no Docker daemon at {host or 'the default socket'} ({error}); {HOW_TO_START}"
                ) from error
        return _clients[host]


def remove_containers(host: str, run_id: str) -> tuple[int, str]:
    """Remove the containers of a run. Returns how many, and what went wrong or ""."""
    from docker.errors import APIError, DockerException

    try:
        client = _client(host)
        found = client.containers(all=True, filters={"label": f"{RUN_LABEL}={run_id}"})
        for container in found:
            _remove(client, container["Id"])
        return len(found), ""
    except (SandboxError, APIError, DockerException, OSError) as error:
        return 0, f"containers could not be removed: {error}"


def _remove(client: Any, container: str, patience_s: float = 20.0) -> None:
    """Remove a container and wait until the daemon no longer knows it."""
    from docker.errors import APIError, NotFound

    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            client.remove_container(container, force=True, v=True)
            return
        except NotFound:
            return
        except APIError as error:
            if error.status_code != 409:  # 409: the daemon is removing it already
                raise
            time.sleep(0.02)
    raise SandboxError(f"container {container} is still there after {patience_s} s")


class DockerSandbox(SupervisedSandbox):
    """One container. ``reset`` starts a fresh one: an agent is root inside, nothing of the old one is trusted."""

    home = "/root"

    def __init__(self, spec: SandboxSpec, scratch: Path | str | None = None) -> None:
        super().__init__(spec)
        self.scratch = scratch
        self.host = os.environ.get("DOCKER_HOST", "")
        self.run_folder: Run | None = None
        self.name = ""
        self.image_env: dict[str, str] = {}
        self._attached: Any = None

    async def start(self) -> None:
        launch = asyncio.ensure_future(asyncio.to_thread(self._launch))
        try:
            sock = await asyncio.shield(launch)
        except asyncio.CancelledError:
            await asyncio.wait([launch])  # a container made meanwhile must not be forgotten
            await self._destroy()
            raise
        except SandboxError:
            await self._destroy()
            raise
        self.channel = Channel(sock, multiplexed=True)
        await self._greet(START_TIMEOUT_S)

    def _launch(self) -> socket.socket:
        client = _client(self.host)
        from docker.errors import APIError, DockerException, ImageNotFound

        self.run_folder = Run.enter(self.scratch, id(self), self._destroy_now)
        self.run_folder.note("docker_hosts", self.host)
        self.name = f"megatron-rsi-{self.run_folder.id}-{next(_numbers)}"
        image = self.spec.image or DEFAULT_IMAGE
        try:
            self._read_image(client, image)
            client.create_container(**self._container(client, image))
            self._attached = client.attach_socket(self.name, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
            client.start(self.name)
        except ImageNotFound as error:
            raise SandboxError(f"image {image!r} is not on this machine: build, pull or import it first") from error
        except (APIError, DockerException, OSError) as error:
            hint = "; the image needs python3" if "python3" in str(error) else ""
            raise SandboxError(f"the container of {image!r} did not start: {error}{hint}") from error
        return _plain_socket(self._attached)

    def _read_image(self, client: Any, image: str) -> None:
        config = client.inspect_image(image)["Config"] or {}
        self.image_env = dict(item.split("=", 1) for item in config.get("Env") or () if "=" in item)

    def _container(self, client: Any, image: str) -> dict[str, object]:
        """Arguments of ``create_container``."""
        memory_bytes = (self.spec.memory_mb << 20) + SUPERVISOR_MEMORY_BYTES
        assert self.run_folder is not None
        owner = self.run_folder.owner
        host_config = client.create_host_config(
            network_mode="bridge" if self.spec.network else "none",
            mem_limit=memory_bytes,
            memswap_limit=memory_bytes,
            nano_cpus=round(self.spec.cpus * 1e9) if self.spec.cpus else None,
            pids_limit=self.spec.max_processes + SUPERVISOR_PROCESSES,
            cap_drop=["ALL"],
            cap_add=CAPABILITIES,
            security_opt=["no-new-privileges"],
            log_config={"type": "none", "config": {}},  # the channel is no log
            auto_remove=True,
        )
        return {
            "image": image,
            "name": self.name,
            "hostname": "sandbox",
            "user": "0:0",
            "entrypoint": ["python3", "-I", "-S", "-c", BOOTSTRAP],
            "working_dir": "/",
            "stdin_open": True,
            "healthcheck": {"test": ["NONE"]},
            "labels": {RUN_LABEL: self.run_folder.id, OWNER_LABEL: f"{owner.host}:{owner.pid}:{owner.start_ticks}"},
            "host_config": host_config,
        }

    def _base_env(self) -> dict[str, str]:
        return {**BASE_ENV, "HOME": self.home, **self.image_env}

    def _limits(self) -> dict[str, int]:
        limits = {"CORE": 0, "FSIZE": self.spec.disk_mb << 20}
        if self.spec.cpu_s is not None:
            limits["CPU"] = ceil(self.spec.cpu_s)
        return limits

    async def reset(self, snapshot: Snapshot | None = None, *, spec: SandboxSpec | None = None) -> None:
        self._adopt(spec)
        await self.close()
        await self.start()
        if snapshot:
            await super().reset(snapshot)

    async def changed_system_files(self) -> list[tuple[str, str]]:
        from docker.errors import DockerException

        try:
            changes = await asyncio.to_thread(_client(self.host).diff, self.name)
        except (DockerException, OSError) as error:
            raise SandboxError(f"the daemon cannot tell what changed: {error}") from error
        return _files_changed(changes or [], [root for root, _ in self._roots()])

    async def _failure_details(self) -> str:
        return bytes(self.channel.stderr).decode("utf-8", "replace").strip() if self.channel else ""

    async def _destroy(self) -> None:
        await asyncio.to_thread(self._destroy_now)

    def _destroy_now(self) -> None:
        if self.channel:
            self.channel.close()
        if self._attached is not None:
            self._attached.close()
            self._attached = None
        if self.name:
            _remove(_client(self.host), self.name)
            self.name = ""
        if self.run_folder:
            self.run_folder.leave(id(self))
            self.run_folder = None


def _files_changed(changes: list[dict[str, Any]], roots: list[str]) -> list[tuple[str, str]]:
    """Docker's list of changes, without the writable roots and without directories that are there for their content."""
    kinds = {0: "changed", 1: "added", 2: "deleted"}
    parents = {os.path.dirname(change["Path"]) for change in changes}
    return [
        (kinds[change["Kind"]], change["Path"])
        for change in changes
        if change["Path"] not in parents and not any((change["Path"] + "/").startswith(root + "/") for root in roots)
    ]


def _plain_socket(attached: Any) -> socket.socket:
    """The connection below docker-py's wrapper. Nothing was read ahead: the container starts after the attach."""
    raw = getattr(attached, "_sock", attached)
    if type(raw) is not socket.socket:
        raise SandboxError(f"DOCKER_HOST must be unix:// or plain tcp://; a {type(raw).__name__} is not supported")
    return socket.socket(fileno=os.dup(raw.fileno()))
