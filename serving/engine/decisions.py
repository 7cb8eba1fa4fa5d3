"""The decisions of an engine before each step of its scheduler, in a form from which other
processes can do the same."""

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxshare.models import LoadedModel
from jaxshare.serving.engine import agreement
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.engine.session_feed import SessionRequest
from jaxshare.serving.engine.stream import StreamState
from jaxshare.serving.engine.submitted_sessions import SubmittedSessions
from jaxshare.serving.errors import EngineError, TooLongError
from jaxshare.serving.kvcache.device_lock import Agreed
from jaxshare.serving.kvcache.lease import LeaseTable
from jaxshare.serving.kvcache.policy import Policy
from jaxshare.serving.kvcache.sharing_cost import Costs
from jaxshare.serving.logits_cache.cache import LogitsCache
from jaxshare.serving.logits_cache.hotspot import Hotspot

_ALONE = {"too_long": ""}
"""The record of a request that no other process has to find."""


class StepDecisions:
    """Decides what comes into the scheduler before a step, or takes what another process decided.

    Args:
      scheduler, leases, sessions: of the engine.
      changed: the condition under which requests and sessions are submitted.

    Attributes:
      submitted: requests that are not in the scheduler's queue yet.
      requests: all that have not finished, with their streams.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        leases: LeaseTable,
        sessions: SubmittedSessions,
        changed: threading.Condition,
    ):
        self.submitted: list[Request] = []
        self.requests: dict[Request, StreamState] = {}
        self._scheduler, self._leases, self._sessions = scheduler, leases, sessions
        self._changed = changed
        self._new: list[Request] = []  # of the step that is about to be made
        self._joining: list[SessionRequest] = []

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        scheduler = self._scheduler
        running = scheduler.live or len(scheduler.queue) or len(scheduler.sessions)
        return bool(running or self.submitted or self._sessions.submitted)

    def propose(self, closed: Callable[[], bool], held: Callable[[], bool]) -> Agreed:
        """Decides. `closed` tells whether the engine is shut down, `held` whether new requests wait."""
        kv = self._scheduler.kv
        with self._changed:
            self._new = [*self.submitted]
            self.submitted.clear()
            self._joining = self._sessions.take()
            shared, available = self._leases.shared, self._leases.available
            return {
                "requests": [_named(r, available) if shared else _ALONE for r in self._new],
                "sessions": [[s.owner.number, s.text] for s in self._joining] if shared else [],
                "given_up": [s.owner.number for s in self._scheduler.sessions.feeds if s.given_up],
                "cancelled": [
                    r.number for r in self.requests if r.cancel_wanted and not r.cancelled
                ],
                "admit": not self._leases.num_waiting,
                "only_begun": held(),
                "closed": closed(),
                "speeds": kv.speeds.measured,
                "state": state_digest(self._scheduler) if shared else "",
            }

    def prepare(self, agreed: Agreed) -> None:
        """Waits until this process's program has submitted what another process has decided on.

        Raises:
          EngineError: it has not, or something else, or has come to another state.
        """
        own = state_digest(self._scheduler)
        if own != agreed["state"]:
            raise EngineError(
                f"its requests or its memory are {own}, and those of the process that decides are "
                f"{agreed['state']}; run the same program, the same versions and the same kind of "
                "device in every process"
            )
        with self._changed:
            seconds = agreement.LATE_SECONDS
            self._changed.wait_for(lambda: not self._missing(agreed), seconds)
            if missing := self._missing(agreed):
                here = ", ".join(describe(request) for request in self.submitted)
                raise EngineError(
                    f"it has not submitted {missing} within {seconds:g} seconds"
                    f"{f', but {here}' if here else ''}; run the same program with the same "
                    "prompts, samplers and seeds in every process"
                )
            self._match(agreed)

    def _missing(self, agreed: Agreed) -> str:
        """Names the first thing that this process's program has not submitted yet; "" for none."""
        waiting = [digest(request) for request in self.submitted]
        for each in agreed["requests"]:
            if each["digest"] not in waiting:
                return each["text"]
            waiting.remove(each["digest"])
        sessions = [[each.owner.number, each.text] for each in self._sessions.submitted]
        return next(
            (f"{text} of session {number}" for number, text in agreed["sessions"]
             if [number, text] not in sessions),
            "",
        )  # fmt: skip

    def _match(self, agreed: Agreed) -> None:
        self._new = []
        for each in agreed["requests"]:
            request = next(r for r in self.submitted if digest(r) == each["digest"])
            self.submitted.remove(request)
            request.number = each["number"]
            request.seed, request.next_seed = each["seeds"]
            self._new.append(request)
        self._joining = [self._sessions.take_one(number) for number, _ in agreed["sessions"]]

    def apply(self, agreed: Agreed) -> None:
        """Puts requests and sessions into the scheduler, and cancels requests."""
        scheduler = self._scheduler
        for request, each in zip(self._new, agreed["requests"], strict=True):
            if each["too_long"]:
                scheduler.output.abort(request, TooLongError(each["too_long"]))
            else:
                scheduler.queue.add(request)
        cancelled = set(agreed["cancelled"])
        if cancelled:
            with self._changed:  # others submit meanwhile
                for request in self.requests:
                    request.cancelled |= request.number in cancelled
        scheduler.sessions.end_feeds(agreed["given_up"])
        scheduler.sessions.add(self._joining)
        scheduler.kv.speeds.use(*agreed["speeds"])
        self._new, self._joining = [], []

    def take_joining(self) -> list[SessionRequest]:
        """Gives the sessions that were decided on and did not come into the scheduler."""
        found, self._joining = self._joining, []
        return found

    def forget_finished(self) -> None:
        """Forgets requests that have finished."""
        for request in [r for r, state in self.requests.items() if state.output is not None]:
            del self.requests[request]


def settings_of(
    model: LoadedModel,
    sizes: tuple[int, int, int, int | None],
    policy: str | Policy,
    logits: LogitsCache | None,
    hotspot: Hotspot,
) -> dict[str, Any]:
    """The settings of an engine that its decisions follow from, by name, as plain data."""
    tokens, _, rows, passes = sizes
    return {
        "model": repr(model.config),
        "approximate_kv": model.approximate_kv,
        "tokens of memory": tokens,
        "max_rows": rows,
        "passes": passes,
        "policy": policy if isinstance(policy, str) else type(policy).__name__,
        "logits_cache": logits and [logits.max_bytes, logits.num_top_logits, logits.bytes],
        "hotspot": repr(hotspot),
    }


def agree_on_settings(
    leases: LeaseTable, scheduler: Scheduler, settings: Mapping[str, Any]
) -> None:
    """Compares the engine's settings in all processes, which then decide by the same costs.

    A process that is alone has nothing to agree on.

    Raises:
      EngineError: they differ.
    """
    if not leases.shared:
        return

    def propose() -> Agreed:
        return {"settings": settings, "costs": scheduler.kv.costs.as_json()}

    def prepare(agreed: Agreed) -> None:
        for name, value in agreed["settings"].items():
            if settings[name] != value:
                raise EngineError(
                    f"its engine has {name} {settings[name]!r}, and that of the process that "
                    f"decides {value!r}; make it with the same settings in every process"
                )

    with leases.exclusive("start", propose, prepare) as agreed:
        scheduler.kv.costs = Costs.from_json(agreed["costs"])


def _named(request: Request, available: int) -> dict[str, Any]:
    """A request as other processes find it among their own.

    Args:
      request: the request.
      available: tokens of memory that sessions have not leased.
    """
    too_long = ""
    if request.max_tokens > available:
        too_long = (
            f"{describe(request)} needs {request.max_tokens} tokens of memory, but sessions have "
            f"all but {available}; close one, raise kv_bytes or shorten it"
        )
    return {
        "number": request.number,
        "digest": digest(request),
        "seeds": [request.seed, request.next_seed],
        "text": describe(request),
        "too_long": too_long,
    }


def digest(request: Request) -> str:
    """A hash of all that a program gives for a request. It is the same in every process."""
    given = (
        request.given_seed,
        request.sampler,
        request.max_new_tokens,
        request.agent,
        request.priority,
        request.place,
        request.resample,
        request.scored,
        request.processed,
        request.both,
        request.stream.detokenizer.stops,
    )
    return text_digest(repr(given).encode() + request.prompt.tobytes())


def text_digest(data: bytes) -> str:
    """A short hash of bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def describe(request: Request) -> str:
    """A request in words, for errors."""
    seed = "no seed" if request.given_seed is None else f"seed {request.given_seed}"
    return (
        f"request {request.number} (a prompt of {len(request.prompt)} tokens, "
        f"{request.max_new_tokens} new ones, {seed}, digest {digest(request)})"
    )


def state_digest(scheduler: Scheduler) -> str:
    """A hash of what the scheduler's next decisions follow from."""
    rows = [
        (row.index, row.request.number, len(row.request.output), row.request.output[-4:])
        for row in scheduler.live
    ]
    queue = [request.number for request in scheduler.queue]
    kv = scheduler.kv
    memory = (kv.pool.free, kv.pool.largest, kv.leased_tokens, kv.tree.evicted)
    return text_digest(repr((rows, queue, memory, len(scheduler.sessions))).encode())
