"""Adapters of a running engine: added, replaced and removed between two dispatches."""

import dataclasses
import os

from jaxshare.models.adapters.adapter_params import AdapterError, AdapterParams
from jaxshare.models.adapters.loaded import as_adapter, named_adapter
from jaxshare.models.adapters.places import Adapter, Adapters
from jaxshare.serving.engine.weights import WeightsHost
from jaxshare.serving.errors import EngineError


class AdaptersHost(WeightsHost):
    """The part of an engine that has adapters beside its model's weights."""

    def adapters(self) -> tuple[Adapter, ...]:
        """Returns the adapters that requests can name, in the order in which they were added."""
        loaded = self.model.adapters
        return tuple(loaded.loaded.values()) if loaded else ()

    def add_adapter(
        self, name: str, adapter: str | os.PathLike | AdapterParams, *, replace: bool = False
    ) -> Adapter:
        """Adds an adapter between two dispatches; from any thread. Nothing is compiled.

        Args:
          name: that requests name it by.
          adapter: a folder of PEFT files, or the matrices.
          replace: take the place of one of this name; what is under way with that goes on with it, in
            a place that stays taken as long.

        Raises:
          AdapterError: it cannot be read, is not one of the model, has too large a rank, or its name is
            taken; the engine goes on as it was.
          FileNotFoundError: there is no such folder; likewise.
          EngineError: the engine's model has no places for adapters, or none is free; likewise.
          ClosedError: it was shut down.
        """
        with self._updating:
            places = self._places()
            params = as_adapter(name, adapter, self.model.config_of_checkpoint)
            if name in places.loaded and not replace:
                raise AdapterError(
                    f"an adapter {name!r} is loaded already; give replace=True, or another name"
                )
            with self._leases.exclusive("adapter"):
                places = self._places()
                kept = places.without(name) if name in places.loaded else places
                added = kept.with_adapter(name, params, self._free_place(kept))
                self._use_adapters(added, places.loaded.get(name))
            return added.named(name)

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter: new requests cannot name it, and those under way go on with it to their
        ends, and so do sessions. Its place is free when the last of them is over.

        Raises:
          AdapterError: there is none of this name.
          EngineError, ClosedError: see `add_adapter`.
        """
        with self._updating:
            self._places().named(name)
            with self._leases.exclusive("adapter"):
                places = self._places()
                self._use_adapters(places.without(name), places.named(name))

    def _places(self) -> Adapters:
        """The adapters of the model.

        Raises:
          EngineError, ClosedError: see `add_adapter`.
        """
        self._check_open()
        if self.model.adapters is None:
            raise EngineError(
                "the engine's model has no places for adapters; make the engine with "
                "model.with_adapters(max_adapters=N, max_rank=R)"
            )
        return self.model.adapters

    def _adapter_of(self, name: str | None) -> Adapter | None:
        """The adapter of a request that is being submitted."""
        return self.model.adapter if name is None else named_adapter(self.model.adapters, name)

    def _use_adapters(self, adapters: Adapters, gone: Adapter | None) -> None:
        """Goes on with these, of which one that was there is gone. The device is the caller's."""
        with self._changed:
            self._use(dataclasses.replace(self.model, adapters=adapters))
        if gone and all(gone.digest != each.digest for each in adapters.loaded.values()):
            self._scheduler.kv.forget(gone.digest)

    def _free_place(self, adapters: Adapters) -> int:
        """A place that no adapter has, and no request or session uses.

        Raises:
          EngineError: there is none.
        """
        with self._changed:
            requests = [r for r, stream in self._requests.items() if stream.output is None]
            users = [*(r.adapter for r in requests), *self._adapters_of_sessions()]
        own = [*adapters.loaded.values(), self.model.adapter]
        taken = {each.place for each in (*own, *users) if each is not None}
        free = next((n for n in range(1, adapters.max_adapters + 1) if n not in taken), None)
        if free is None:
            names = ", ".join(sorted(adapters.loaded)) or "none"
            raise EngineError(
                f"all {adapters.max_adapters} places for adapters are taken (loaded: {names}; places of "
                "removed ones are free when what uses them is over); remove one, or make the engine's "
                "model with more max_adapters"
            )
        return free
