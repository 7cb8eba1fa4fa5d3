"""Models on the nodes of a cluster.

Each replica loads its own; the program that distributes work has an outline without parameters.
"""

import argparse
import dataclasses
import os
from pathlib import Path

from jaxshare import models
from jaxshare.models import LoadedModel
from jaxshare.serving.cluster import process_mesh


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The model that every node loads itself, as plain data that can be sent there.

    Attributes:
      path: a folder that all nodes have, a hub id, or "embedded", which is part of every node's
        installation.
      dtype, tensor, kv: the options of a command.
    """

    path: str
    dtype: str | None
    tensor: int
    kv: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> "ModelSpec":
        """The model of a command's options."""
        is_folder = options.model != "embedded" and Path(options.model).is_dir()
        return cls(
            str(Path(options.model).resolve()) if is_folder else options.model,
            options.dtype,
            options.tensor,
            options.kv,
        )

    def outline(self) -> LoadedModel:
        """Reads the model without its parameters, on the machine that distributes work.

        Raises:
          FileNotFoundError, ConfigError, ValueError: see `jaxshare.models.load`.
        """
        return models.outline(self.path)

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
        mesh = process_mesh.mesh_of(argparse.Namespace(tensor=self.tensor, kv=self.kv))
        return models.load(self.path, dtype=self.dtype, mesh=mesh)
