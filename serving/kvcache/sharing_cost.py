"""The cost of an attention layer's decode pass on a device, as a linear model. It decides when
sharing a block pays (`sharing_plan.plan_sharing`).

A block that many rows read together is read once, and costs arithmetic for each of them; a row's
own block is read by that row alone (Hydragen section 3). The first wins for long blocks with many
rows, the second for short ones with few.
"""

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jaxshare.models import LoadedModel
from jaxshare.models.config import ModelConfig
from jaxshare.paths import cache_folder, write_json
from jaxshare.serving.inputs import cache_dtype
from jaxshare.serving.locks import updating
from jaxshare.sharding import MODEL_AXES, axis_size

SHARED_TILE = 512
"""Tokens of a tile that several rows read together."""
PRIVATE_TILE = 128
"""Tokens of a tile that one row reads alone."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Microseconds of one attention layer in a pass of one new token per row.

    A tile that is not full costs as much as a full one.

    Attributes:
      shared_start: once, if any block is read together: one more loop and merge.
      shared_tile: for each tile of a block that is read together, whatever the number of rows.
      shared_token_row: for each token of such a tile and each row that reads it.
      private_row: for each row, before it reads the first tile of its own block.
      private_tile: for each tile of a row's own block.
    """

    shared_start: float
    shared_tile: float
    shared_token_row: float
    private_row: float
    private_tile: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < math.inf
            ):
                raise ValueError(
                    f"the cost {field.name} is {value!r}; give it as a number of microseconds, 0 "
                    "or more"
                )

    def shared[T: (float, np.ndarray)](self, tokens: T, rows: int) -> T:
        """The cost of one block that `rows` rows read together, without `shared_start`."""
        return -(-tokens // SHARED_TILE) * (
            self.shared_tile + SHARED_TILE * rows * self.shared_token_row
        )

    def private[T: (float, np.ndarray)](self, tokens: T) -> T:
        """The cost of one row's own block."""
        return self.private_row + -(-tokens // PRIVATE_TILE) * self.private_tile

    def as_json(self) -> dict[str, float]:
        """The costs as plain data: each by its name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> "Costs":
        """The costs that `as_json` made this data from.

        Raises:
          ValueError: the data is no object, a cost is missing or unknown, or is not a finite number
            of 0 or more.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(data, Mapping):
            raise ValueError(
                f"costs are an object with the entries {', '.join(names)}, but this is {data!r}; "
                "calibrate again"
            )
        if missing := [name for name in names if name not in data]:
            raise ValueError(f"the costs lack {missing[0]}; calibrate again")
        if unknown := [name for name in data if name not in names]:
            raise ValueError(
                f"the costs have an entry {unknown[0]!r} that means nothing here; calibrate again"
            )
        return cls(**data)


DEFAULT = Costs(
    shared_start=220, shared_tile=60, shared_token_row=0.024, private_row=0, private_tile=16
)
"""Costs of two CPU cores, measured with 8 heads and 4 kv heads of dimension 64 in bfloat16: for a
CPU that has not been calibrated."""


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """The shape of one layer's attention, on one device.

    Attributes:
      heads, kv_heads: on the device.
      head_dim: D.
      itemsize: bytes of one number in the cache.
      has_values: values are stored; else they are a part of keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    has_values: bool = True


@dataclasses.dataclass(frozen=True)
class DeviceCosts:
    """The rates of an accelerator by its data sheet.

    Attributes:
      memory: bytes/s.
      products: FLOP/s of the matrix units in bfloat16 (float16 where there is no bfloat16), without
        sparsity.
      units: multiprocessors, or cores, that work in parallel.
    """

    memory: float
    products: float
    units: int

    def costs(self, shape: AttentionShape) -> Costs:
        """Costs by a roofline, for a pass that is limited by memory or by products alone.

        The numbers are those of benchmarks/roofline.md for the H200: copies reach 90 % of the data
        sheet's rate; products of attention, whose softmax is hidden in part, reach 55 %; a block of
        one row is multiplied in tiles of 64 queries, most of them padding, at 72 %; a work item
        ends in 1 us on its unit, and the merge reads the results of one more block in 1 us.
        """
        token = (1 + shape.has_values) * shape.kv_heads * shape.head_dim * shape.itemsize
        narrow = 1 if shape.itemsize <= 2 else _WIDE
        flops = 4 * shape.head_dim
        read = token / (_COPIES * self.memory)
        padded = shape.kv_heads * _PADDED * flops * narrow / (_PRODUCTS * self.products)
        merge = 2 * 4 * shape.heads * (shape.head_dim + 1) / (_COPIES * self.memory)
        return Costs(
            *(
                1e6 * seconds
                for seconds in (
                    _MERGE,
                    SHARED_TILE * read,
                    shape.heads * flops * narrow / (_ATTENTION * self.products),
                    shape.kv_heads * _PIECE / self.units + merge,
                    PRIVATE_TILE * max(read, padded),
                )
            )
        )


_COPIES, _PRODUCTS, _ATTENTION = 0.90, 0.72, 0.55
"""The shares of the data sheet's rates that copies, large products, and products with a softmax
between them reach."""
_PADDED = 64
"""The fewest queries that a tile is multiplied with."""
_PIECE, _MERGE = 1e-6, 1e-6
"""Seconds: the end of a work item on its unit; the merge of one more block."""
_WIDE = 16
"""Products of float32 take this many times longer than those of bfloat16: they do not use the
matrix units."""

DEVICES: Mapping[str, DeviceCosts] = {
    "NVIDIA GB200": DeviceCosts(8.0e12, 2500e12, 148),
    "NVIDIA B200": DeviceCosts(8.0e12, 2250e12, 148),
    "NVIDIA GH200": DeviceCosts(4.0e12, 989e12, 132),
    "NVIDIA H200": DeviceCosts(4.8e12, 989e12, 132),
    "NVIDIA H100": DeviceCosts(3.35e12, 989e12, 132),
    "NVIDIA H100 PCIe": DeviceCosts(2.0e12, 756e12, 114),
    "NVIDIA H100 NVL": DeviceCosts(3.9e12, 835e12, 132),
    "NVIDIA H20": DeviceCosts(4.0e12, 148e12, 78),
    "NVIDIA A100": DeviceCosts(2.039e12, 312e12, 108),
    "NVIDIA A100-SXM4-40GB": DeviceCosts(1.555e12, 312e12, 108),
    "NVIDIA A100-PCIE-40GB": DeviceCosts(1.555e12, 312e12, 108),
    "NVIDIA A40": DeviceCosts(0.696e12, 150e12, 84),
    "NVIDIA A30": DeviceCosts(0.933e12, 165e12, 56),
    "NVIDIA A10": DeviceCosts(0.6e12, 125e12, 72),
    "NVIDIA A10G": DeviceCosts(0.6e12, 70e12, 80),
    "NVIDIA L40S": DeviceCosts(0.864e12, 362e12, 142),
    "NVIDIA L40": DeviceCosts(0.864e12, 181e12, 142),
    "NVIDIA L4": DeviceCosts(0.3e12, 121e12, 58),
    "NVIDIA RTX 6000 Ada": DeviceCosts(0.96e12, 364e12, 142),
    "NVIDIA RTX A": DeviceCosts(0.768e12, 155e12, 84),
    "NVIDIA GeForce RTX 50": DeviceCosts(1.792e12, 210e12, 170),
    "NVIDIA GeForce RTX 40": DeviceCosts(1.008e12, 165e12, 128),
    "NVIDIA GeForce RTX 30": DeviceCosts(0.936e12, 71e12, 82),
    "Tesla V100": DeviceCosts(0.9e12, 125e12, 80),
    "Tesla T4": DeviceCosts(0.32e12, 65e12, 40),
}
"""Data sheets by the beginning of JAX's name of the device (`device_kind`); the longest match
counts. A family (RTX 30, RTX 40, RTX 50, RTX A) has its largest card here: a smaller one has less
of everything in about the same proportion, and only proportions decide."""
OTHER_DEVICE = "NVIDIA A100"
"""The entry for an accelerator that is not in the table: 153 FLOP per byte, in the middle of the
table (H200: 206, RTX 3090: 76, L4: 403)."""


def predicted(kind: str, shape: AttentionShape) -> tuple[Costs, str]:
    """The costs of a device that has not been calibrated, and their entry of the table.

    Args:
      kind: JAX's name of the device.
      shape: of one layer's attention on it.

    Returns:
      `DEFAULT` and "cpu" for a CPU; for any other device the costs by a roofline, from its own
        entry or from `OTHER_DEVICE`.
    """
    if kind.lower() == "cpu":
        return DEFAULT, "cpu"
    entry = max((name for name in DEVICES if _begins(kind, name)), key=len, default=OTHER_DEVICE)
    return DEVICES[entry].costs(shape), entry


def _begins(kind: str, name: str) -> bool:
    """Returns whether a device's kind begins with this name as whole words: an L40 is no L4."""
    rest = kind[len(name) :]
    return kind.startswith(name) and (
        not rest[:1].isalnum() or name[-1:] == "A" or name.startswith("NVIDIA GeForce")
    )


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Costs, and their source in words that end a sentence."""

    costs: Costs
    source: str


def choose(model: LoadedModel, file: Path | None = None) -> Chosen:
    """The costs measured for this device and the model's shape; else those for this device and
    another shape; else those of `predicted`.

    Warns:
      UserWarning: the file of measurements cannot be read.
    """
    file, kind, shape = file or costs_file(), _device(), _shape(model.config, model)
    try:
        shapes = json.loads(file.read_text(encoding="utf-8")).get(kind, {})
        if data := shapes.get(shape):
            return Chosen(Costs.from_json(data), f"measured on this device, {kind} ({file})")
        if other := next(iter(shapes.items()), None):
            return Chosen(
                Costs.from_json(other[1]),
                f"measured on this device, {kind}, for another shape, {other[0]} ({file})",
            )
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        warnings.warn(
            f"the costs in {file} cannot be read ({error}); defaults are used until `jaxshare "
            "calibrate` writes it again",
            stacklevel=2,
        )
    c, tensor = model.config, axis_size(model.mesh, MODEL_AXES)
    costs, entry = predicted(
        kind,
        AttentionShape(
            c.num_heads // tensor,
            c.num_kv_heads // tensor,
            c.head_dim,
            cache_dtype(model).itemsize if model.approximate_kv is None else 1,
            c.value_dim > 0,
        ),
    )
    source = (
        "of two CPU cores"
        if entry == "cpu"
        else f"that a roofline predicts for {entry}"
        + ("" if kind.startswith(entry) else f", since {kind} is not in the table")
    )
    return Chosen(costs, f"{source}; `jaxshare calibrate` measures this device")


def load_costs(model: LoadedModel, file: Path | None = None) -> Costs:
    """The costs that `choose` gives."""
    return choose(model, file).costs


def save_costs(model: LoadedModel, costs: Costs, file: Path | None = None) -> Path:
    """Writes the costs for this device and the model's shape; returns the file.

    Raises:
      OSError: the file cannot be written.
    """
    file = file or costs_file()
    with updating(file):
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            saved = {}
        saved = saved if isinstance(saved, dict) else {}
        shapes = saved.get(_device())
        saved[_device()] = {
            **(shapes if isinstance(shapes, dict) else {}),
            _shape(model.config, model): costs.as_json(),
        }
        write_json(file, saved)
    return file


def costs_file() -> Path:
    """The file of measured costs, in the user's cache folder or $JAXSHARE_CACHE."""
    return cache_folder() / "costs.json"


def _device() -> str:
    return jax.devices()[0].device_kind


def _shape(config: ModelConfig, model: LoadedModel) -> str:
    heads = f"{config.num_heads} heads, {config.num_kv_heads} kv heads"
    cache = model.approximate_kv or cache_dtype(model).name
    return f"{heads}, dim {config.head_dim}, {cache}"
