"""Warm boxes: started once, reset between leases, replaced when they die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from .base import SandboxError, SandboxSpec
from .bubblewrap import BubblewrapSandbox
from .channel import SupervisedSandbox
from .cleanup import sweep

KINDS = ("bubblewrap", "docker")
START_TRIES = 3
FIRST_PAUSE_S = 0.2  # doubles after each failed start


async def make_sandbox(
    kind: str, spec: SandboxSpec | None = None, scratch: Path | str | None = None
) -> SupervisedSandbox:
    """Start a sandbox. The one place that chooses a back end.

    ``scratch``: folder for what must be known to clean up after a crash; default ``$TMPDIR/megatron-rsi-<uid>``.
    ValueError for an unknown kind; SandboxError when the sandbox does not start.
    """
    box: SupervisedSandbox
    if kind == "bubblewrap":
        box = BubblewrapSandbox(spec or SandboxSpec(), scratch)
    elif kind == "docker":
        from .docker import DockerSandbox  # only who uses Docker needs docker-py

        box = DockerSandbox(spec or SandboxSpec(), scratch)
    else:
        raise ValueError(f"unknown sandbox kind {kind!r}; valid: {', '.join(KINDS)}")
    await box.start()
    return box


@dataclass
class PoolCounters:
    """Boxes started, leases served by a box that had served before, boxes that died or could not be reset."""

    started: int = 0
    reused: int = 0
    died: int = 0


class SandboxPool:
    """At most ``size`` boxes. Belongs to one event loop.

    >>> async with SandboxPool("bubblewrap", 4, SandboxSpec()) as pool:   # doctest: +SKIP
    ...     async with pool.lease() as box:
    ...         await box.exec("ls", timeout_s=5)
    """

    def __init__(
        self, kind: str, size: int, spec: SandboxSpec | None = None, scratch: Path | str | None = None
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown sandbox kind {kind!r}; valid: {', '.join(KINDS)}")
        if size < 1:
            raise ValueError(f"size={size} must be at least 1")
        self.kind, self.size, self.spec, self.scratch = kind, size, spec or SandboxSpec(), scratch
        self.counters = PoolCounters()
        self.closed = False
        self._slots = asyncio.Semaphore(size)
        self._idle: list[SupervisedSandbox] = []
        self._leased: set[SupervisedSandbox] = set()
        self._num_slots_taken = 0  # each has one box at most, also while it is starting one

    async def __aenter__(self) -> SandboxPool:
        await asyncio.to_thread(sweep, self.scratch)
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.close(drain_s=10.0 if kind is None else 0.0)

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec | None = None) -> AsyncIterator[SupervisedSandbox]:
        """A box as new, this caller's alone. Waits for a free slot. SandboxError after three failed starts."""
        async with self._slots:
            if self.closed:
                raise SandboxError("the sandbox pool is closed")
            self._num_slots_taken += 1
            try:
                box = await self._obtain(spec or self.spec)
                self._leased.add(box)
                try:
                    yield box
                finally:
                    await self._give_back(box)
            finally:
                self._num_slots_taken -= 1

    async def _obtain(self, spec: SandboxSpec) -> SupervisedSandbox:
        while box := self._take_idle(spec):
            try:
                await box.reset(spec=spec)
                self.counters.reused += 1
                return box
            except SandboxError:
                self.counters.died += 1
            except BaseException:
                await box.close()
                raise
        if len(self._idle) + self._num_slots_taken > self.size:
            await self._idle.pop(0).close()  # one of another shape makes room
        return await self._start(spec)

    def _take_idle(self, spec: SandboxSpec) -> SupervisedSandbox | None:
        for box in reversed(self._idle):
            if box.spec.shape() == spec.shape():
                self._idle.remove(box)
                return box
        return None

    async def _start(self, spec: SandboxSpec) -> SupervisedSandbox:
        for attempt in range(START_TRIES):
            try:
                box = await make_sandbox(self.kind, spec, self.scratch)
                self.counters.started += 1
                return box
            except SandboxError:
                if attempt + 1 == START_TRIES:
                    raise
                await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    async def _give_back(self, box: SupervisedSandbox) -> None:
        try:
            if box.alive and not self.closed:
                await box.kill_processes()  # now: what an agent left running costs the other boxes time
                self._idle.append(box)
            else:
                self.counters.died += not self.closed
                await box.close()
        except SandboxError:
            self.counters.died += 1
        except BaseException:
            await box.close()
            raise
        finally:
            self._leased.discard(box)

    async def close(self, drain_s: float = 10.0) -> None:
        """No new leases; wait up to ``drain_s`` for the open ones, then end every box."""
        self.closed = True
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._leased and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        boxes = [*self._idle, *self._leased]
        self._idle.clear()
        await asyncio.gather(*(box.close() for box in boxes))
