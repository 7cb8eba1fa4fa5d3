"""The router of Ray Serve by which requests go to replicas.

Ray's own PrefixCacheAffinityRouter is a part of ray.llm, which does not import without the packages
that come with vLLM, and knows no replica that holds what a request is about.
"""

import collections
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxshare.serving.http.replicas.prefixes import PrefixMap
from jaxshare.serving.http.replicas.routes import Route


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that holds what it is about, or by the rule of `PrefixMap`.

    It reads the argument `route` of a call, a `Route`. It runs in the process that calls.
    """

    def initialize_state(self, spread: int = 8) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes the arguments of the deployment.

        Args:
          spread: see `PrefixMap`.
        """
        self._map = PrefixMap(spread=spread)
        self._chosen: dict[str, str] = {}
        self._running: dict[str, str] = {}
        self._loads: collections.Counter[str] = collections.Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes the replicas that run."""
        names = {each.replica_id.unique_id for each in replicas}
        if names != {each.unique_id for each in self.curr_replicas}:
            self._map.keep(names)
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns the replicas in the order in which they should be asked, one in each rank."""
        route = _route_of(pending_request)
        named = {each.replica_id.unique_id: each for each in candidate_replicas}
        if route.holder in named:
            return [[named[route.holder]]]
        waiting = collections.Counter(self._chosen.values())
        order = self._map.order(
            route.keys, {name: self._loads[name] + waiting[name] for name in named}
        )
        if pending_request is not None and order:
            self._choose(pending_request, order[0], route)
        return [[named[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Counts a request that a replica has taken."""
        name = replica_id.unique_id
        self._running[pending_request.metadata.internal_request_id] = name
        self._loads[name] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Counts the end of a request, however it came."""
        name = self._running.pop(internal_request_id, None)
        if name is not None:
            self._loads[name] -= 1
            if not self._loads[name]:
                del self._loads[name]

    def _choose(self, request: PendingRequest, name: str, route: Route) -> None:
        """Counts a request that is on its way, so that those that come meanwhile see it."""
        identity = request.metadata.internal_request_id
        if self._chosen.get(identity) != name:
            self._chosen[identity] = name
            self._map.add(route.keys, name)
            request.future.add_done_callback(lambda _: self._chosen.pop(identity, None))


def _route_of(request: PendingRequest | None) -> Route:
    route = request and request.kwargs.get("route")
    return route if isinstance(route, Route) else Route()
