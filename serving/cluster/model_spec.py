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
from jaxshare.serving.cluster import process_mesh


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The model that every node loads itself, as plain data that can be sent there.

    Attributes:
      path: a folder that all nodes have, a hub id, or "embedded", which is part of every node's
        installation.
      dtype, tensor, kv, expert, approximate_kv: the options of a command.
    """

    path: str
    dtype: str | None
    tensor: int
    kv: int
    expert: int = 1
    approximate_kv: str | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> "ModelSpec":
        """The model of a command's options."""
        is_folder = options.model != "embedded" and Path(options.model).is_dir()
        return cls(
            str(Path(options.model).resolve()) if is_folder else options.model,
            options.dtype,
            options.tensor,
            options.kv,
            getattr(options, "expert", 1),
            options.approximate_kv,
        )

    def outline(self) -> LoadedModel:
        """Reads the model without its parameters, on the machine that distributes work.

        Raises:
          FileNotFoundError, ConfigError, ValueError: see `jaxshare.models.load`.
        """
        return dataclasses.replace(models.outline(self.path), approximate_kv=self.approximate_kv)

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
        return models.load(
            self.path, dtype=self.dtype, mesh=mesh, approximate_kv=self.approximate_kv
        )


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
