"""Mappings that never change, whose later versions share most of what they have."""

from collections.abc import Iterator, Mapping
from typing import Any


class Layers(Mapping[Any, Any]):
    """A mapping in layers, in which later ones come first; each is larger than the one after it.

    A new version with one key takes the time and the memory of log(size) keys on average.
    """

    __slots__ = ("_layers",)

    def __init__(self, *layers: Mapping[Any, Any]):
        self._layers = layers

    def __getitem__(self, key: Any) -> Any:
        for layer in reversed(self._layers):
            if key in layer:
                return layer[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter({key: None for layer in self._layers for key in layer})

    def __len__(self) -> int:
        return len({key for layer in self._layers for key in layer})

    def __or__(self, changed: Mapping[Any, Any]) -> "Layers":
        """This mapping with other values of some keys."""
        below = list(self._layers)
        while below and len(below[-1]) <= len(changed):
            changed = {**below.pop(), **changed}
        return Layers(*below, changed)
