"""Models on the nodes of a cluster.

Each replica loads its own; the program that distributes work has an outline without parameters.
"""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from jaxshare import models
from jaxshare.argument_checks import as_integer
from jaxshare.models import LoadedModel
from jaxshare.serving.chat_template import read_chat_template, with_chat_template
from jaxshare.serving.cluster import process_mesh


@dataclasses.dataclass(frozen=True)
class AdapterFolders:
    """Adapters that a model is loaded with, as plain data.

    Attributes:
      folders: by name, absolute.
      max_adapters, max_rank: that there is room for; None as `LoadedModel.with_adapters` has it.
      used: the one of all texts; None where requests name theirs.
    """

    folders: tuple[tuple[str, str], ...] = ()
    max_adapters: int | None = None
    max_rank: int | None = None
    used: str | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, *, several: bool = False) -> "AdapterFolders":
        """Those of a command's options, which are of requests that name theirs, if there may be
        several.

        Raises:
          ValueError: one is not NAME=FOLDER, two have one name, or there are several for all texts.
        """
        found: dict[str, str] = {}
        for given in getattr(options, "adapter", None) or ():
            name, equals, folder = given.partition("=")
            if not (name and equals and folder) or name in found:
                why = "is given twice" if name in found else "must be NAME=FOLDER"
                raise ValueError(f"--adapter is {given!r}, but it {why}")
            found[name] = os.path.abspath(folder)
        if len(found) > 1 and not several:
            raise ValueError(
                f"--adapter is given {len(found)} times, but all texts of this command have one; give "
                "one, or name adapters as the models of requests (jaxshare serve, OpenAI's lines)"
            )
        most, rank = (getattr(options, n, None) for n in ("max_adapters", "max_adapter_rank"))
        return cls(tuple(found.items()), most, rank, None if several else next(iter(found), None))

    def beside(self, model: LoadedModel) -> LoadedModel:
        """Returns a model with these; the same where there are none, and no room for any.

        Raises:
          FileNotFoundError, AdapterError: see `LoadedModel.with_adapters`.
        """
        if not self.folders and self.max_adapters is None and self.max_rank is None:
            return model
        room = {"max_adapters": self.max_adapters, "max_rank": self.max_rank}
        return model.with_adapters(dict(self.folders), **room).using(self.used)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The model that every node loads itself, as plain data that can be sent there.

    Attributes:
      path: a folder that all nodes have, a hub id, or "embedded", which is part of every node's
        installation.
      dtype, tensor, kv, expert, approximate_kv: the options of a command.
      adapters: beside it, in folders that all nodes have.
      chat_template: in place of the checkpoint's own, or None.
    """

    path: str
    dtype: str | None
    tensor: int
    kv: int
    expert: int = 1
    approximate_kv: str | None = None
    adapters: AdapterFolders = AdapterFolders()
    chat_template: str | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, *, several: bool = False) -> "ModelSpec":
        """The model of a command's options; `several` as for `AdapterFolders.of`."""
        return cls(
            options.model,
            options.dtype,
            options.tensor,
            options.kv,
            getattr(options, "expert", 1),
            options.approximate_kv,
            AdapterFolders.of(options, several=several),
            read_chat_template(getattr(options, "chat_template", None)),
        ).here()

    def here(self) -> "ModelSpec":
        """The same, where a folder is named from the root, as other nodes have it."""
        is_folder = self.path != "embedded" and Path(self.path).is_dir()
        path = str(Path(self.path).resolve()) if is_folder else self.path
        return dataclasses.replace(self, path=path)

    def outline(self) -> LoadedModel:
        """Reads the model without its parameters, on the machine that distributes work.

        Raises:
          FileNotFoundError, ConfigError, ValueError: see `jaxshare.models.load`.
        """
        outline = models.outline(self.path)
        return self._templated(dataclasses.replace(outline, approximate_kv=self.approximate_kv))

    def _templated(self, model: LoadedModel) -> LoadedModel:
        template = self.chat_template
        return model if template is None else with_chat_template(model, template)

    def load(self) -> LoadedModel:
        """Loads the model on this node.

        Raises:
          FileNotFoundError: this node has no such folder.
          ConfigError, CheckpointError, ValueError: see `jaxshare.models.load`.
        """
        if os.path.isabs(self.path) and not os.path.isdir(self.path):
            raise FileNotFoundError(
                f"there is no folder {self.path}; give every node the model at the same path, or "
                "name it by a hub id"
            )
        sizes = argparse.Namespace(tensor=self.tensor, kv=self.kv, expert=self.expert)
        mesh = process_mesh.mesh_of(sizes)
        model = models.load(
            self.path, dtype=self.dtype, mesh=mesh, approximate_kv=self.approximate_kv
        )
        return self.adapters.beside(self._templated(model))


def shortened(model: Any, max_model_len: int | None) -> Any:
    """Returns the model with a context of so many tokens.

    Args:
      model: a `LoadedModel`.
      max_model_len: tokens; None for its own context.

    Raises:
      ValueError: less than 2 tokens, or more than the model has.
      TypeError: no whole number.
    """
    if max_model_len is None:
        return model
    most = as_integer("--max-model-len", max_model_len, 2, model.config.max_positions)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, max_positions=most))
