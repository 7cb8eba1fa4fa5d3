"""Checkpoints: the state that a program continues from after a kill.

Written in the background; a checkpoint is complete or does not exist. A folder holds numbered ones,
each of arrays and of metadata (JSON values), written by Orbax: every device or host writes its part
of a distributed array, and it is read back in parts, onto any devices. A list of the checksums of
its files is in each, and is checked before anything is read; those of former versions have none.
"""

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxshare.models.config_fields import first_line
from jaxshare.models.orbax_package import orbax
from jaxshare.models.orbax_reading import root_cause, waiting_for_reads
from jaxshare.paths import make_folder, reason, sync_folder
from jaxshare.serving import checksums
from jaxshare.serving.errors import TooLongError
from jaxshare.serving.locks import OutputLock

_MAX_KEPT = 2
"""Checkpoints that a folder keeps: the newest, and the one before it."""
_LIST = "checksums.json"
_UNLISTED = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that Orbax writes after the list and that nothing is read from."""
_UNPUBLISHED = ".orbax-checkpoint-tmp"
"""A part of the name of a checkpoint that is being written."""
_ADVICE = "give number= (on the command line --resume-from) for the one before it"
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""The errors of metadata that has other values than were saved."""
_log = logging.getLogger("jaxshare")


_OTHER = "give another folder for the checkpoints"


class SaveError(ValueError):
    """A checkpoint cannot be written, is missing or incomplete, or belongs to something else."""


class CheckpointStore:
    """Writes the checkpoints of one folder, which other processes leave alone until it is closed.

    Within a process the newest store has the folder: a session that is restored from it goes on
    saving there, whether the session before it was closed or not.
    """

    def __init__(self, folder: str | os.PathLike):
        """Creates the folder if needed, and deletes incomplete checkpoints of a killed process.

        Damaged ones, in place of which this process has opened one before them, are deleted, too.

        Where several processes write one checkpoint together, process 0 locks the folder for all.

        Raises:
          SaveError: a folder that cannot be written, or that another process has.
        """
        ocp = orbax()

        self.folder, self._replaced, real = Path(folder), False, Path(folder).resolve()
        if former := _newest.pop(real, None):
            former._replaced = True
            with contextlib.suppress(SaveError):  # of the former, which is told at its next save
                former.close()
        with _lock(self.folder) as lock:
            try:
                make_folder(self.folder)
                self._manager = _manager(
                    real,
                    max_to_keep=_MAX_KEPT,
                    cleanup_tmp_directories=True,
                    # Orbax calls it before the rename that publishes a checkpoint.
                    async_options=ocp.AsyncOptions(
                        post_finalization_callback=functools.partial(_list_unpublished, real)
                    ),
                )
            except OSError as error:
                raise SaveError(
                    f"{folder} cannot be written ({reason(error)}); {_OTHER}"
                ) from error
            # Counted among those that are kept, it would push an intact one out.
            for number in _stepped_over.pop(real, set()) & {*self._manager.all_steps()}:
                _log.warning(
                    "warning: checkpoint %d of %s is damaged; it is deleted", number, folder
                )
                self._manager.delete(number)
            self._finalize = weakref.finalize(self, _close, self._manager, lock.pop_all())
        _newest[real] = self

    @classmethod
    def of(cls, folder: str | os.PathLike, current: "CheckpointStore | None") -> "CheckpointStore":
        """Returns the current store if it is of this folder; else closes it and opens a new one.

        Raises:
          SaveError: a folder that cannot be written, or the last checkpoint of the current store
            could not be, or a newer store of this process has the folder.
        """
        if current and current.folder == Path(folder):
            if current._replaced:
                raise SaveError(
                    f"{folder} has the checkpoints of a newer session or engine of this process, "
                    f"which saves there now; {_OTHER}"
                )
            return current
        if current:
            current.close()
        return cls(folder)

    def save(
        self, arrays: Mapping[str, Any], metadata: Mapping[str, Any], *, wait: bool = False
    ) -> int:
        """Starts to write a checkpoint, and returns as soon as the arrays may change.

        Waits for the checkpoint before it, if that is still being written.

        Args:
          arrays: by name.
          metadata: JSON values.
          wait: return when it is complete.

        Returns:
          Its number.

        Raises:
          SaveError: it cannot be written, or the one before it could not.
        """
        ocp = orbax()

        with self._save_errors():
            number = 1 + max(self._manager.all_steps(), default=0)
            # Orbax refuses arrays without elements.
            nonempty = {name: array for name, array in arrays.items() if array.size}
            empty = {
                name: [array.shape, str(array.dtype)]
                for name, array in arrays.items()
                if not array.size
            }
            items: dict[str, Any] = {"arrays": ocp.args.StandardSave(nonempty)} if nonempty else {}
            self._manager.save(
                number,
                force=True,
                args=ocp.args.Composite(
                    **items,
                    facts=ocp.args.JsonSave(
                        {"facts": {**metadata}, "empty": empty, "arrays": len(nonempty)}
                    ),
                ),
            )
        if wait:
            self.wait()
        return number

    def wait(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
          SaveError: it could not be written.
        """
        with self._save_errors():
            self._manager.wait_until_finished()
            sync_folder(self.folder)

    def close(self) -> None:
        """Waits for the last checkpoint, and closes the store.

        Raises:
          SaveError: it could not be written.
        """
        if not self._finalize.alive:
            return
        try:
            self.wait()
        finally:
            self._finalize()

    @contextlib.contextmanager
    def _save_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # many types, from a full disk to a deleted folder
            raise SaveError(
                f"no checkpoint could be written to {self.folder} ({root_cause(error)}); make room "
                "on its disk, or give another folder: earlier ones can still be restored"
            ) from error


_newest: weakref.WeakValueDictionary[Path, CheckpointStore] = weakref.WeakValueDictionary()
"""The last store of this process for each folder."""
_stepped_over: dict[Path, set[int]] = {}
"""Damaged checkpoints of each folder, in place of which one before them was opened."""


def _lock(folder: Path) -> contextlib.ExitStack:
    """Locks a folder of checkpoints, in process 0 for all, until the result is closed."""
    lock = contextlib.ExitStack()
    if jax.process_index() == 0:
        try:
            lock.enter_context(OutputLock.of_folder(folder, _OTHER))
        except ValueError as error:
            raise SaveError(str(error)) from error
    return lock


def _manager(folder: Path, **options: Any) -> Any:
    """Makes Orbax's manager of a folder of checkpoints, which reads the times of all of them.

    Raises:
      SaveError: the file that has the times of one is damaged.
      OSError: the folder cannot be written.
    """
    ocp = orbax()

    try:
        return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**options))
    except OSError:
        raise
    except Exception as error:  # many types: the file is JSON, but not what Orbax writes
        raise SaveError(
            f"{folder} cannot be read, because the {_UNLISTED[0]} of a checkpoint in it is damaged "
            f"({root_cause(error)}); move that checkpoint away, and the others can be restored"
        ) from error


def _close(manager: Any, lock: contextlib.ExitStack) -> None:
    with lock:
        manager.close()


class SavedCheckpoint:
    """Reads one checkpoint.

    Attributes:
      folder: of the checkpoints.
      number: of this one.
      metadata: as it was saved.
    """

    def __init__(self, folder: str | os.PathLike, number: int | None = None):
        """Opens a checkpoint; only complete ones are found.

        Args:
          folder: of the checkpoints.
          number: of one of them; default the newest that is not damaged. A warning is logged for
            each that is.

        Raises:
          SaveError: there is none, or it cannot be read.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise SaveError(
                f"there is no folder {folder} to restore from; give one that has checkpoints"
            )
        self._manager = _manager(self.folder.resolve(), create=False)
        self.close = weakref.finalize(self, self._manager.close)
        numbers = sorted(self._manager.all_steps())
        if not numbers or number not in (None, *numbers):
            listed = ", ".join(map(str, numbers))
            if numbers:
                raise SaveError(
                    f"{folder} has the checkpoints {listed}, not {number}; give number={numbers[-1]}, on "
                    f"the command line --resume-from {numbers[-1]}"
                )
            raise SaveError(
                f"{folder} has no complete checkpoint; give a folder that has checkpoints"
            )
        self.number = self._open(numbers if number is None else [number])
        self.metadata: dict[str, Any] = self._description["facts"]

    def _open(self, numbers: Sequence[int]) -> int:
        """Reads the description of the newest of these checkpoints that is not damaged.

        Where several processes restore, all check all files, and so open the same one.

        Returns:
          Its number.

        Raises:
          SaveError: all are damaged; names the newest.
        """
        ocp = orbax()

        damaged: dict[int, SaveError] = {}
        for number in reversed(numbers):
            self.number = number
            try:
                self._check()
                self._description = self._restore(facts=ocp.args.JsonRestore()).facts
                if {"facts", "empty", "arrays"} - {*self._description}:
                    raise self._unreadable("its description is damaged")
            except SaveError as error:
                damaged[number] = error
                continue
            _stepped_over[self.folder.resolve()] = {*damaged}
            for error in damaged.values():
                why = str(error).removesuffix(f"; {_ADVICE}")
                _log.warning("warning: %s; checkpoint %d is opened instead", why, number)
            return number
        raise next(iter(damaged.values()))

    def _check(self) -> None:
        """Checks the files against their checksums, where the checkpoint has them.

        Raises:
          SaveError: a file is damaged or cannot be read; names it.
        """
        folder = self.folder / str(self.number)
        if not (folder / _LIST).exists():
            return  # of a former version
        try:
            checksums.check_list(folder, _LIST)
        except (OSError, ValueError) as error:
            raise self._unreadable(str(error)) from error

    def _unreadable(self, why: str) -> SaveError:
        return SaveError(
            f"checkpoint {self.number} of {self.folder} cannot be read ({why}); {_ADVICE}"
        )

    def arrays(self, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Reads the arrays.

        Args:
          like: the form of each: `jax.ShapeDtypeStruct` with a sharding, or a numpy array; default
            all as they were saved.

        Raises:
          SaveError: they cannot be read, or have other shapes or dtypes.
        """
        ocp = orbax()

        arrays = {
            name: np.zeros(shape, dtype)
            for name, (shape, dtype) in self._description["empty"].items()
        }
        nonempty = (
            None
            if like is None
            else {name: array for name, array in like.items() if name not in arrays}
        )
        if self._description["arrays"]:
            arrays |= self._restore(arrays=ocp.args.StandardRestore(nonempty)).arrays
        for name, array in (like or {}).items():
            if arrays[name].shape != array.shape or arrays[name].dtype != array.dtype:
                raise SaveError(
                    f"{name} in checkpoint {self.number} of {self.folder} is "
                    f"{arrays[name].dtype}{[*arrays[name].shape]}, not "
                    f"{array.dtype}{[*array.shape]}; it belongs to something else"
                )
        return arrays

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Makes a SaveError of the error with which values are used that nothing has saved."""
        try:
            yield
        except (SaveError, TooLongError):
            raise
        except _DAMAGE as error:
            raise self._unreadable(
                f"it has what was never saved: {type(error).__name__}: {first_line(error)}"
            ) from error

    def _restore(self, **args: Any) -> Any:
        ocp = orbax()

        try:
            with waiting_for_reads():
                return self._manager.restore(self.number, args=ocp.args.Composite(**args))
        except Exception as error:  # many types, from a missing file to a truncated one
            raise self._unreadable(root_cause(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _list_unpublished(folder: Path) -> None:
    """Brings the checkpoint that is being written to the disk and lists its checksums."""
    if jax.process_index():
        return
    unpublished = [path for path in folder.iterdir() if _UNPUBLISHED in path.name]
    for path in unpublished:
        checksums.write_list(path, _LIST, _UNLISTED)
    if not unpublished:  # never published without the list
        raise FileNotFoundError(f"{folder} has no unpublished checkpoint")


def has_checkpoints(folder: str | os.PathLike) -> bool:
    """Returns True if a folder has a complete checkpoint."""
    return Path(folder).is_dir() and any(
        path.name.isdigit() and path.is_dir() for path in Path(folder).iterdir()
    )


def on_host(array: Any) -> np.ndarray:
    """Copies an array to the host; first gathers it where no process has all of it."""
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        mesh = array.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
        array = jax.device_put(array, NamedSharding(mesh, PartitionSpec()))
    return np.asarray(array)


def leaves(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a pytree by their paths in it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def check_approximation(save: SavedCheckpoint, approximate_kv: str | None) -> None:
    """Refuses a checkpoint whose keys and values are of another form than the model's caches have.

    Raises:
      SaveError: as described.
    """
    saved = save.metadata.get("approximate_kv")  # earlier versions had exact ones alone
    if saved != approximate_kv:
        forms = [f"approximated as {name}" if name else "exact" for name in (saved, approximate_kv)]
        raise SaveError(
            f"save {save.number} of {save.folder} has keys and values that are {forms[0]}, but here "
            f"they are {forms[1]}; load the model with approximate_kv={saved!r} to go on from it"
        )
