"""Stored responses, in memory, with bounds of their number and their bytes."""

import collections
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxshare.serving.http.errors import ApiError


@dataclasses.dataclass(frozen=True)
class StoredResponse:
    """A response and the dialogue that it ends.

    Attributes:
      owner: the hash of the key that it was made with; another one does not see it.
      response: as it was answered.
      messages: of the dialogue, the answer among them.
      size: bytes of both as JSON.
    """

    owner: str
    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    size: int


class ResponseStore:
    """Keeps the newest responses.

    Args:
      most: responses; 0 keeps none.
      most_bytes: of all of them together.
    """

    def __init__(self, most: int, most_bytes: int):
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._stored: collections.OrderedDict[str, StoredResponse] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, owner: str, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Stores a response under its id; the oldest ones leave where there is no room."""
        size = len(json.dumps([response, [*messages]]))
        self._stored[response["id"]] = StoredResponse(owner, response, messages, size)
        self._bytes += size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            self._bytes -= self._stored.popitem(last=False)[1].size

    def get(self, owner: str, identity: str, param: str | None = None) -> StoredResponse:
        """Returns a response.

        Args:
          owner: that asks.
          identity: of the response.
          param: the field that names it, for errors.

        Raises:
          ApiError: it is not there, or another one's (404).
        """
        found = self._stored.get(identity)
        if found is None or found.owner != owner:
            raise ApiError(
                404,
                f"there is no response {identity[:64]!r}; the server keeps the newest "
                f"{self._most} in memory",
                param=param,
                code="response_not_found",
            )
        return found

    def delete(self, owner: str, identity: str) -> None:
        """Forgets a response.

        Raises:
          ApiError: as `get` does.
        """
        self._bytes -= self.get(owner, identity).size
        del self._stored[identity]
