"""Other weights for a running engine: what becomes of its requests, its caches and its sessions."""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

from jaxshare.argument_checks import INT32_MAX, as_integer, as_timeout, shown
from jaxshare.models import LoadedModel
from jaxshare.models.new_params import FormerParams, NewParams, ParamsForm
from jaxshare.serving.engine import validation
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.engine.session_host import SessionHost
from jaxshare.serving.errors import EngineError
from jaxshare.serving.logits_cache.cache import LogitsCache

FINISH, RESTART, CONTINUE = WAYS = "finish", "restart", "continue"
"""What may become of requests under way; see `Engine.update_params`."""
_POLL_SECONDS = 0.05
"""The time between two looks at sessions, which are closed without a word."""


class WeightsHost(SessionHost):
    """The part of an engine that exchanges the weights of its model.

    Attributes:
      model: as it is served now.
    """

    model: LoadedModel
    _num_drains = 0
    _owns_params = False
    """The arrays of the model were made here, and are seen as `model.params` alone."""

    def _start_updates(self, given: int | LogitsCache) -> None:
        """Prepares for updates; `given` is the Logits Cache, or its size, as the engine got it."""
        self._updating = threading.Lock()
        self._owns_logits = not isinstance(given, LogitsCache)

    @functools.cached_property
    def _params_form(self) -> ParamsForm:
        return ParamsForm(self.model)

    @property
    def logits_cache(self) -> LogitsCache | None:
        """The Logits Cache."""
        return self._scheduler.output.logits

    def check_params(self, params: Any) -> NewParams:
        """Checks weights as `update_params` does, and changes nothing.

        Raises:
          ParamsError, EngineError, ClosedError: see `update_params`.
        """
        with self._changed:
            self._check_can_update()
            if self._num_drains:
                raise EngineError(
                    "the engine is being drained; update its weights before, or when drain has "
                    "returned"
                )
        return self._params_form.check(params)

    def update_params(
        self,
        params: Any,
        *,
        running: str = FINISH,
        version: int | None = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Exchanges the weights of the model between two dispatches; from any thread.

        They are placed as the weights before were: packed, quantised or on the mesh, so that nothing
        is compiled again. The prefix tree, its copies in host memory and the Logits Cache forget what
        the old weights computed. `model` is another object from then on; the engine lets go of the
        old weights before it copies the new ones, so that it holds one copy at any time.

        Args:
          params: {"params": ...}, with all parameters of the model by their names, as `Decoder` and
            `LoadedModel.named_params` have them; or as `LoadedModel.params` has them.
          running: what becomes of requests under way. "finish": they end first, and so do sessions of
            workers; requests that have not begun wait. "restart": they begin again with their
            prompts; not with sessions. "continue": they go on, with what they have cached; those that
            have sampled nothing begin again. `Completion.versions` has the version for each token.
          version: a number for the weights, larger than the last one; by default the next one.
          copy: False uses arrays that are placed as the engine's as they are: nothing may change
            them, or donate them to a program, while the engine has them. Copies are written into
            those of an update before, unless something holds their arrays, `model`'s, still.
          timeout: seconds to wait for what is to finish; None for any time.

        Returns:
          The version.

        Raises:
          ParamsError: a parameter is missing, is none of the model's, has another shape or dtype, or
            is not finite; it is named, and the engine goes on as it was.
          TimeoutError: requests or sessions have not finished in time; likewise.
          EngineError: the engine is being drained, or run by several processes, or sessions were to
            be restarted; likewise. Or the weights could not be placed, which ends the engine.
          ClosedError: it was shut down.
        """
        if not isinstance(running, str) or running not in WAYS:
            raise ValueError(f"running is {shown(running)}; it must be one of {', '.join(WAYS)}")
        seconds = as_timeout("timeout", timeout)
        end = None if seconds is None else time.monotonic() + seconds
        with self._updating:
            found, number = self.check_params(params), self._next_version(version)
            with self._new_requests_wait(running == FINISH):
                while not self._exchanged(found, running, number, copy):
                    self._wait_for_running(end, seconds)
        return number

    def _next_version(self, version: Any) -> int:
        least = self.params_version + 1
        if version is not None and (given := as_integer("version", version)) < least:
            raise ValueError(
                f"version is {given}, but the engine's weights have version {least - 1}; give a "
                "larger one, or none"
            )
        return least if version is None else as_integer("version", version, least, INT32_MAX)

    def _check_can_update(self) -> None:
        """Raises EngineError where the weights must stay as they are."""
        self._check_open()
        if self._leases.shared:
            raise EngineError(
                "several processes run the engine; its weights can be exchanged where one alone does"
            )

    @contextlib.contextmanager
    def _new_requests_wait(self, wait: bool) -> Iterator[None]:
        """Lets requests that have not begun wait meanwhile."""
        with self._changed:
            self._is_held = wait
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                if self._decisions.has_work and not self._closed:
                    self._start_thread()
                self._changed.notify_all()

    def _num_running(self) -> tuple[int, int]:
        """The requests and the sessions under way."""
        running = [r for r, stream in self._requests.items() if r.begun and stream.output is None]
        return len(running), self._num_open_sessions()

    def _wait_for_running(self, end: float | None, seconds: float | None) -> None:
        """Waits until nothing is under way.

        Raises:
          TimeoutError: something is at the time `end`, after so many seconds.
        """
        with self._changed:
            while any(counts := self._num_running()) and not self._closed:
                left = _POLL_SECONDS if end is None else end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"{counts[0]} requests and {counts[1]} sessions of workers have not finished "
                        f"within {seconds} seconds, and the weights are as they were; close sessions, "
                        "allow more time, or update with running='continue'"
                    )
                self._changed.wait(min(left, _POLL_SECONDS))

    def _exchanged(self, found: NewParams, running: str, version: int, copy: bool) -> bool:
        """Exchanges the weights in a turn of their own; False if something has to finish before."""
        with self._leases.exclusive("update"):
            with self._changed:
                self._check_can_update()
                if running == FINISH and any(self._num_running()):
                    return False
                if running == RESTART and (count := self._num_open_sessions()):
                    raise EngineError(
                        f"{count} sessions of workers are under way, and what they have told cannot "
                        "be taken back; close them, or update with running='finish' or 'continue'"
                    )
            _leave_weights(self._scheduler, running)
            self._exchange(found, version, copy)
        return True

    def _exchange(self, found: NewParams, version: int, copy: bool) -> None:
        """Lets go of the old weights, and puts the new ones in their place.

        Raises:
          EngineError: that has failed, and the engine has ended.
        """
        form, logits = self._params_form, self.logits_cache
        former = FormerParams(self.model.params, found) if self._owns_params else None
        self._use(dataclasses.replace(self.model, params={}))
        if logits is not None and self._owns_logits:
            logits.close()
        try:
            model = dataclasses.replace(
                self.model, params=form.placed(found, copy=copy, former=former)
            )
            self._scheduler.output.logits = logits and validation.emptied(logits, model)
        except BaseException as failure:  # also an interrupt: there are no weights
            self._end_for_good(failure)
            self._scheduler.clear()
            raise EngineError(
                f"the engine has lost its weights, as the new ones could not be placed "
                f"({type(failure).__name__}: {failure}); make another"
            ) from failure
        self._owns_logits, self._owns_params = True, copy
        self._scheduler.output.version = version
        self.metrics.set_params_version(version)
        self._use(model)

    def _use(self, model: LoadedModel) -> None:
        """Goes on with a model of other weights or adapters."""
        self.model = model
        self._scheduler.use(model)
        with self._changed:
            for each in self._weights_users:
                if (session := each()) is not None:
                    session.use_weights(model)


def _leave_weights(scheduler: Scheduler, running: str) -> None:
    """Prepares the requests of a scheduler for other weights, and forgets what it has computed."""
    for row in scheduler.live:
        if running == CONTINUE and row.request.sampled:
            row.drafts = None  # they are an earlier output's
        else:
            scheduler.send_back(row)
    for request in [*(row.request for row in scheduler.live), *scheduler.queue]:
        _leave_old_weights(request, scheduler.output.version, running)
    scheduler.forget()


def _leave_old_weights(request: Request, version: int, running: str) -> None:
    if request.begun and running == RESTART:
        request.start_over()
    elif request.sampled:
        request.versions.append((len(request.sampled), version))
        request.resample = None  # its distributions are of both
    request.top_logits.clear()
    request.num_written = 0
    if request.resample or request.sampled:
        request.watched = request.state = None
