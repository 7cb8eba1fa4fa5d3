"""Models on the nodes of a cluster: how a replica loads one, and what a program that only hands out
work needs of it."""

import argparse
import dataclasses
import os
from pathlib import Path

from jaxshare import models
from jaxshare.models import LoadedModel
from jaxshare.serving.cluster import process_mesh


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model that every node loads itself. Plain data, which can be sent there.

    Attributes:
      path: a folder that all nodes have, a hub id, or "embedded", of which every node has a folder
        of its own.
      dtype, tensor, kv: as commands ask for them.
    """

    path: str
    dtype: str | None
    tensor: int
    kv: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> "ModelSpec":
        """The one that a command was asked for."""
        here = options.model != "embedded" and Path(options.model).is_dir()
        return cls(
            str(Path(options.model).resolve()) if here else options.model,
            options.dtype,
            options.tensor,
            options.kv,
        )

    def outline(self) -> LoadedModel:
        """The model without its parameters; on the machine that hands out work.

        Raises:
          FileNotFoundError, ConfigError, ValueError: see `jaxshare.models.load`.
        """
        return models.outline(self.path)

    def load(self) -> LoadedModel:
        """The model; on the node where this is called.

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
