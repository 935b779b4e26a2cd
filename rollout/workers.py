"""Many pieces of work at once, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def in_parallel(items: Iterable[T], work: Callable[[T], Awaitable[None]], width: int) -> None:
    """Awaits ``work`` of every item, ``width`` at a time, in order of their start.

    The first exception ends all of it and is raised as it is: a full disk is told as that, not as a group of them.
    """
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
