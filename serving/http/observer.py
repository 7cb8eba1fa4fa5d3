"""The engine as pages and dashboards see it: one snapshot for all that look at the same time."""

import asyncio
import collections
import time
from typing import Any

from jaxshare.serving.engine.snapshot import CachedRun, EngineSnapshot
from jaxshare.serving.http.service import Service

_FRESH_SECONDS = 0.25
"""A snapshot holds the engine for a moment, so that all who look share one of this age."""
_RATE_SECONDS = 5.0
"""Rates are means over this time."""


class Observer:
    """Looks at the engine of a service.

    Args:
      service: whose engine it is, and whose sessions.
    """

    def __init__(self, service: Service):
        self._service = service
        self._taken: tuple[float, EngineSnapshot] | None = None
        self._task: asyncio.Future[EngineSnapshot] | None = None
        self._counts: collections.deque[tuple[float, int, int]] = collections.deque()

    async def snapshot(self) -> EngineSnapshot:
        """Returns a snapshot that is at most a quarter of a second old.

        Raises:
          ApiError: the engine was shut down.
        """
        if self._taken and time.monotonic() - self._taken[0] < _FRESH_SECONDS:
            return self._taken[1]
        if self._task is None:
            self._task = asyncio.ensure_future(self._take())
            self._task.add_done_callback(self._forget_task)
        # One who goes away must not take it from the others.
        return await asyncio.shield(self._task)

    async def _take(self) -> EngineSnapshot:
        taken = await self._service.in_thread(self._service.engine.snapshot)
        now = time.monotonic()
        self._taken = now, taken
        sampled = taken.sampled_tokens + sum(
            session.num_sampled for session in self._service.sessions.values()
        )
        self._counts.append((now, sampled, taken.passes))
        while len(self._counts) > 2 and now - self._counts[1][0] > _RATE_SECONDS:
            self._counts.popleft()
        return taken

    def _forget_task(self, task: asyncio.Future) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it

    def _rate(self, which: int) -> float:
        """The increase of a count a second; 0 where nothing can be told yet."""
        if len(self._counts) < 2:
            return 0.0
        first, last = self._counts[0], self._counts[-1]
        seconds = last[0] - first[0]
        return max(0.0, (last[which] - first[which]) / seconds) if seconds > 0 else 0.0

    async def stats(self) -> dict[str, Any]:
        """Returns rows, queue, rates and memory as JSON.

        Raises:
          ApiError: as `snapshot` does.
        """
        seen, service = await self.snapshot(), self._service
        size, sessions = seen.bytes_per_token, [*service.sessions.values()]
        admitted = seen.admitted_tokens
        return {
            "object": "engine.stats",
            "rows": {
                "total": seen.num_rows,
                "decoding": sum(row.decoding for row in seen.rows),
                "prefilling": sum(not row.decoding for row in seen.rows),
            },
            "waiting": seen.waiting,
            "sessions": {
                "total": len(sessions),
                "running": sum(session.status == "running" for session in sessions),
            },
            "tokens_per_second": round(self._rate(1), 2),
            "passes_per_second": round(self._rate(2), 2),
            "sampled_tokens": seen.sampled_tokens,
            "prompt_tokens": admitted,
            "reused_tokens": seen.reused_tokens,
            "hit_rate": round(seen.reused_tokens / admitted, 4) if admitted else None,
            "memory": {
                "capacity_bytes": seen.capacity * size,
                "used_bytes": (seen.capacity - seen.free) * size,
                "session_bytes": seen.leased * size,
                "host_capacity_bytes": seen.host_capacity * size,
                "host_used_bytes": seen.host_used * size,
                "logits_bytes": seen.logits_bytes,
            },
            "requests": [
                {
                    "row": row.row,
                    "request": row.request,
                    "agent": row.agent,
                    "state": "decoding" if row.decoding else "prefilling",
                    "prompt_tokens": row.prompt_tokens,
                    "sampled_tokens": row.sampled_tokens,
                    "max_tokens": row.max_new_tokens,
                }
                for row in seen.rows
            ],
        }

    async def cache(self) -> dict[str, Any]:
        """Returns the cached runs of tokens as JSON, parents before their children.

        Raises:
          ApiError: as `snapshot` does.
        """
        seen = await self.snapshot()
        return {
            "object": "engine.cache",
            "capacity": seen.capacity,
            "free": seen.free,
            "host_capacity": seen.host_capacity,
            "host_used": seen.host_used,
            "bytes_per_token": seen.bytes_per_token,
            "leases": [{"offset": offset, "capacity": size} for offset, size in seen.leases],
            "rows": [{"row": row.row, "agent": row.agent, "run": row.run} for row in seen.rows],
            "runs": [self._run(run) for run in seen.runs],
            "runs_left_out": seen.runs_left_out,
        }

    def _run(self, run: CachedRun) -> dict[str, Any]:
        told = {
            "parent": run.parent,
            "tokens": run.tokens,
            "cached": run.cached,
            "place": run.place,
            "offset": run.offset,
            "capacity": run.capacity,
            "readers": run.readers,
            "writing": run.writing,
            "uses": run.uses,
            "agents": [agent for agent in run.agents if agent],
        }
        if self._service.settings.show_texts:
            told["text"] = self._service.decode(run.first_tokens)
        return told
