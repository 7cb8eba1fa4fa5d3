"""Siblings: requests of one state, of which each distribution is computed once (Hive, section 6).

Searches fire a state several times at once. The distributions that one of these requests computes
are written to the Logits Cache as they come. Another one that has drawn the same tokens so far takes
the next distribution from there, draws its own token from it, and goes on so; it holds no row.
Where its token is one that no other has drawn, it enters a row of its own, after the tokens whose
keys and values the others have. Each text is the one that its request has alone.
"""

from collections.abc import Iterable, Sequence

from jaxshare.serving.engine.output import OutputProcessor
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.running_request import RunningRequest

_FIRST_PASSES = 4
"""Passes of a dispatch for which a request waits that has followed nothing yet."""


class Siblings:
    """The unfinished requests with `resample`, by their states.

    Args:
      output: the engine's, whose Logits Cache they share.
    """

    def __init__(self, output: OutputProcessor):
        self._output = output
        self._families: dict[bytes, list[Request]] = {}
        self._num_ended = 0

    def look_up(self, live: Sequence[RunningRequest]) -> None:
        """Gives waiting requests what the Logits Cache has of their outputs by now.

        Args:
          live: the rows in use.
        """
        self._forget_finished()
        self._ask_again()
        for request in [r for r in self._output.queue if r.resample]:
            if request.watched is None:
                watched = self._output.watch(request)
                if request.resample is None:
                    continue
                family = self._families.setdefault(watched.state, [])
                family.append(request)
                if len(family) == 2:  # the first one was alone, and has kept what it computed
                    self._write(row.request for row in live if row.request is family[0])
                self._output.look_up(request)
            elif request.state in self._output.written and _is_replay(request):
                self._output.go_on(request)
        self._output.written.clear()

    def _ask_again(self) -> None:
        """Lets requests that were left alone, and wait still, be looked up once their kind pays."""
        payoff = self._output.payoff
        if payoff.num_ended == self._num_ended:
            return
        self._num_ended, pays = payoff.num_ended, {}
        for request in self._output.queue:
            watched = request.watched
            if watched is None or request.resample or request.output:
                continue
            if watched.kind not in pays:
                pays[watched.kind] = payoff.kind_pays(watched.kind)
            if pays[watched.kind]:
                request.resample, request.watched = watched.way, None

    def holds(self, request: Request, live: Sequence[RunningRequest]) -> bool:
        """Returns whether a waiting request goes without a row, as another one computes its next
        distribution.

        It does not wait where that is computed, but was not kept or does not decide its token.
        """
        is_alone = len(self._families.get(request.state or b"", ())) < 2
        if is_alone or not _is_replay(request) or not _follows(request):
            return False
        own, state = request.output, request.state
        others = [
            row.request.output
            for row in live
            if row.request.state == state and row.request.resample
        ]
        along = [len(output) for output in others if output[: len(own)] == own]
        return max(along, default=-1) == len(own)

    def passes(self, most: int, live: Sequence[RunningRequest]) -> int:
        """The passes of the next dispatch, at most so many.

        Where requests wait for its distributions they are no more than the tokens that the one that
        followed the fewest has followed, so that it waits no longer in vain than it has saved.
        """
        if not self._families:
            return most
        waiting = [len(r.output) for r in self._output.queue if self.holds(r, live)]
        return min(most, max(_FIRST_PASSES, min(waiting, default=most)))

    def grew(self, request: Request) -> None:
        """Writes what a request has computed, if another one may follow it."""
        family = self._families.get(request.state or b"", ())
        if len(family) > 1 and any(map(_follows, family)):
            self._output.write_logits(request)

    def clear(self) -> None:
        """Forgets all requests."""
        self._families.clear()

    def _write(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._output.write_logits(request)

    def _forget_finished(self) -> None:
        unfinished = {
            state: [request for request in family if not request.finished]
            for state, family in self._families.items()
        }
        self._families = {state: family for state, family in unfinished.items() if family}


def _follows(request: Request) -> bool:
    """Returns whether it may wait for what another request computes."""
    return request.watched is not None and request.watched.follows


def _is_replay(request: Request) -> bool:
    """Returns whether all of its output so far came from the cache."""
    return len(request.output) == request.num_replayed
