"""Who is served next: calls of a higher priority first, and among those agents in turn, by what
each was given so far."""

from collections.abc import Iterator

from jaxshare.serving.engine.request import Request

_MOST_AGENTS = 1024
"""So many are remembered before those are forgotten that need not be."""


class FairQueue:
    """Calls that wait.

    An agent's service is the tokens that were read and written for it. The agent that was given
    least comes first (fair queueing by tokens, Sheng et al. 2024), its calls in the order in which
    they came; an agent that comes anew, or again, begins where the least served of those at work
    is, so that nobody saves up service by being away.
    """

    def __init__(self) -> None:
        self._calls: dict[Request, None] = {}
        self._served: dict[str, float] = {}
        self._at_work: dict[str, int] = {}  # calls of each agent, waiting or running

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they are to be served."""
        return iter(
            sorted(
                self._calls,
                key=lambda call: (-call.priority, self._served[call.agent], call.number),
            )
        )

    def begin(self, call: Request) -> None:
        """A call is there for the first time."""
        if not self._at_work.get(call.agent):
            least = min((self._served[agent] for agent in self._at_work), default=0.0)
            self._served[call.agent] = max(self._served.get(call.agent, 0.0), least)
        self._at_work[call.agent] = self._at_work.get(call.agent, 0) + 1
        self._calls[call] = None

    def put_back(self, call: Request) -> None:
        """A call that was running waits again."""
        self._calls[call] = None

    def take(self, call: Request) -> None:
        """A call waits no more."""
        self._calls.pop(call, None)

    def end(self, call: Request) -> None:
        """A call is over."""
        self.take(call)
        self._at_work[call.agent] -= 1
        if not self._at_work[call.agent]:
            del self._at_work[call.agent]
            least = min((self._served[agent] for agent in self._at_work), default=None)
            if least is None:
                self._served.clear()
            elif (
                len(self._served) > _MOST_AGENTS
            ):  # who was given less than all that are at work is like somebody new
                self._served = {
                    agent: served
                    for agent, served in self._served.items()
                    if agent in self._at_work or served > least
                }

    def serve(self, call: Request, tokens: int) -> None:
        """So many tokens were read or written for a call."""
        self._served[call.agent] += tokens

    def running(self, agent: str) -> int:
        """Calls of an agent that wait or run."""
        return self._at_work.get(agent, 0)
