"""Saves: what a program would go on from after a kill, written in the background and there as a
whole or not at all.

A folder holds numbered saves, each of arrays and of facts (what JSON can say), written by Orbax: an
array that lies on several devices or hosts is written by all of them, each its part, and read so,
onto whatever devices the reader has.
"""

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxshare.models.config_fields import first_line
from jaxshare.models.orbax_io import ended_reads, root_cause

_KEPT = 2
"""Saves of a folder that are kept: the newest, and the one before it."""


class SaveError(ValueError):
    """A save that is not there, not whole, or of something else."""


class CheckpointStore:
    """The saves of one folder, to write to."""

    def __init__(self, folder: str | os.PathLike):
        """Makes the folder if it is not there; what a killed process left half written in it is
        taken away.

        Raises:
          SaveError: a folder that cannot be written.
        """
        import orbax.checkpoint as ocp  # here, because it takes a second

        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self.folder.resolve(),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=_KEPT, cleanup_tmp_directories=True
                ),
            )
        except OSError as error:
            raise SaveError(
                f"{folder} cannot be written ({error}); give another folder for the saves"
            ) from error
        self._end = weakref.finalize(self, self._manager.close)

    @classmethod
    def of(cls, folder: str | os.PathLike, before: "CheckpointStore | None") -> "CheckpointStore":
        """Those of a folder: the ones that were written to before, if they are, which else are
        closed.

        Raises:
          SaveError: a folder that cannot be written, or the last save of another one could not be.
        """
        if before and before.folder == Path(folder):
            return before
        if before:
            before.close()
        return cls(folder)

    def save(
        self, arrays: Mapping[str, Any], facts: Mapping[str, Any], *, wait: bool = False
    ) -> int:
        """Begins a save and comes back as soon as the arrays may change; one that is under way is
        waited for.

        Args:
          arrays: by name.
          facts: what JSON can say.
          wait: come back when it is whole.

        Returns:
          Its number.

        Raises:
          SaveError: it cannot be written, or the one before it could not.
        """
        import orbax.checkpoint as ocp

        with self._failing():
            number = 1 + max(self._manager.all_steps(), default=0)
            # Orbax takes no arrays without elements.
            there = {name: array for name, array in arrays.items() if array.size}
            empty = {
                name: [array.shape, str(array.dtype)]
                for name, array in arrays.items()
                if not array.size
            }
            items: dict[str, Any] = {"arrays": ocp.args.StandardSave(there)} if there else {}
            self._manager.save(
                number,
                force=True,
                args=ocp.args.Composite(
                    **items,
                    facts=ocp.args.JsonSave(
                        {"facts": {**facts}, "empty": empty, "arrays": len(there)}
                    ),
                ),
            )
        if wait:
            self.wait()
        return number

    def wait(self) -> None:
        """Until the last save is whole.

        Raises:
          SaveError: it could not be written.
        """
        with self._failing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save, and ends.

        Raises:
          SaveError: it could not be written.
        """
        try:
            self.wait()
        finally:
            self._end()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (
            Exception
        ) as error:  # of many kinds, from a full disk to a folder that was taken away
            raise SaveError(
                f"nothing could be saved in {self.folder} ({first_line(error)}); what was saved "
                "before can still be restored"
            ) from error


class SavedCheckpoint:
    """One save, to read from.

    Attributes:
      folder, number: which.
      facts: as they were given.
    """

    def __init__(self, folder: str | os.PathLike, number: int | None = None):
        """Finds a save; only whole ones count.

        Args:
          folder: of the saves.
          number: of one of them; default the newest.

        Raises:
          SaveError: there is none, or it cannot be read.
        """
        import orbax.checkpoint as ocp

        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise SaveError(
                f"there is no folder {folder} to restore from; give one that something was saved to"
            )
        self._manager = ocp.CheckpointManager(
            self.folder.resolve(), options=ocp.CheckpointManagerOptions(create=False)
        )
        self.close = weakref.finalize(self, self._manager.close)
        numbers = sorted(self._manager.all_steps())
        if not numbers or number not in (None, *numbers):
            known = f"the saves {', '.join(map(str, numbers))}" if numbers else "no whole save"
            raise SaveError(
                f"{folder} has {known}{'' if number is None else f', not {number}'}; give a folder "
                "that something was saved to"
            )
        self.number = numbers[-1] if number is None else number
        self._said: dict[str, Any] = self._restore(facts=ocp.args.JsonRestore()).facts
        self.facts: dict[str, Any] = self._said["facts"]

    def arrays(self, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The arrays.

        Args:
          like: for each what it is to be: `jax.ShapeDtypeStruct` with a sharding, or a numpy array;
            default all as they were saved.

        Raises:
          SaveError: they cannot be read, or are others than these.
        """
        import orbax.checkpoint as ocp

        found = {
            name: np.zeros(shape, dtype) for name, (shape, dtype) in self._said["empty"].items()
        }
        wanted = (
            None
            if like is None
            else {name: array for name, array in like.items() if name not in found}
        )
        if self._said["arrays"]:
            found |= self._restore(arrays=ocp.args.StandardRestore(wanted)).arrays
        for name, array in (like or {}).items():
            if found[name].shape != array.shape or found[name].dtype != array.dtype:
                raise SaveError(
                    f"{name} in save {self.number} of {self.folder} is "
                    f"{found[name].dtype}{[*found[name].shape]}, not "
                    f"{array.dtype}{[*array.shape]}; it is of something else"
                )
        return found

    def _restore(self, **args: Any) -> Any:
        import orbax.checkpoint as ocp

        try:
            with ended_reads():
                return self._manager.restore(self.number, args=ocp.args.Composite(**args))
        except Exception as error:  # of many kinds, from a missing file to one that was cut short
            raise SaveError(
                f"save {self.number} of {self.folder} cannot be read ({root_cause(error)}); give "
                "number= for the one before it"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def has_checkpoints(folder: str | os.PathLike) -> bool:
    """Whether something whole was saved to a folder."""
    return Path(folder).is_dir() and any(
        path.name.isdigit() and path.is_dir() for path in Path(folder).iterdir()
    )


def on_host(array: Any) -> np.ndarray:
    """An array of which every process has all, or can be given all."""
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        array = jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec()))  # pyright: ignore
    return np.asarray(array)


def leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a pytree by their places in it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
