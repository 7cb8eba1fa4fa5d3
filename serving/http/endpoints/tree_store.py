"""Trees that clients show on the page: a search of agents as it grows, or anything with scores."""

import collections
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxshare.serving.http.errors import ApiError

_MOST_TREES = 64
_MOST_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class StoredTree:
    """A tree as a client has given it.

    Attributes:
      version: counts the times that it was given, from 1.
      nodes: JSON objects, parents before their children.
      size: bytes of them as JSON.
    """

    version: int
    nodes: Sequence[dict[str, Any]]
    size: int


class TreeStore:
    """Keeps the trees that were given last, in memory; each owner sees its own."""

    def __init__(self) -> None:
        self._trees: collections.OrderedDict[tuple[str, str], StoredTree]
        self._trees, self._bytes = collections.OrderedDict(), 0

    def put(self, owner: str, name: str, nodes: Sequence[dict[str, Any]]) -> StoredTree:
        """Stores a tree under a name, in place of the one before it.

        Those that were given longest ago leave where there are more than 64, or 16 MiB.
        """
        before = self._trees.pop((owner, name), None)
        size = len(json.dumps([*nodes]))
        made = StoredTree(before.version + 1 if before else 1, nodes, size)
        self._trees[owner, name] = made
        self._bytes += size - (before.size if before else 0)
        while len(self._trees) > _MOST_TREES or self._bytes > _MOST_BYTES:
            self._bytes -= self._trees.popitem(last=False)[1].size
        return made

    def names(self, owner: str) -> dict[str, StoredTree]:
        """Returns the trees of an owner, the newest one first."""
        mine = [(name, tree) for (each, name), tree in self._trees.items() if each == owner]
        return dict(reversed(mine))

    def get(self, owner: str, name: str) -> StoredTree:
        """Returns a tree.

        Raises:
          ApiError: it is not there (404).
        """
        found = self._trees.get((owner, name))
        if found is None:
            raise ApiError(
                404,
                f"there is no tree {name[:64]!r}; the server keeps the newest {_MOST_TREES} "
                "in memory",
                param="name",
                code="tree_not_found",
            )
        return found

    def delete(self, owner: str, name: str) -> None:
        """Forgets a tree.

        Raises:
          ApiError: as `get` does.
        """
        self._bytes -= self.get(owner, name).size
        del self._trees[owner, name]
