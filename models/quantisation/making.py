"""A model's matrices as codes, layer by layer: no more than one layer is held beside what is written.

With a text each layer is computed twice on its way, plain and quantised, which also gives what the
model loses.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxshare import progress
from jaxshare.models.config import ModelConfig
from jaxshare.models.layers import Decoder
from jaxshare.models.orbax_io import ReadSome
from jaxshare.models.quantisation.calibration import (
    ROWS,
    Inputs,
    Path,
    Seen,
    Weights,
    as_params,
    run_layer,
    scale_inputs,
)
from jaxshare.models.quantisation.rounding import Rounding, rounded
from jaxshare.models.tensor_names import ExpectedTensor
from jaxshare.quantised import QuantisedTensor

Value = np.ndarray | QuantisedTensor
LENGTH = 512
"""Tokens of a row of the text."""
LEAST_TOKENS = 1000
"""A text is no shorter."""
_HELD_OUT = 0.2
"""The part of a text, its end, by which the loss is measured."""
_PLAIN = frozenset({"router", "shared_gate", "k_b", "v_b"})
"""Modules whose matrices stay as they are: small ones, and those of products by head."""


@dataclasses.dataclass(frozen=True)
class Making:
    """How a model is quantised.

    Attributes:
      rounding: of the matrices of layers, and of the head if `embeddings` is None.
      embeddings: of the embedding and the head; None for plain ones.
    """

    rounding: Rounding
    embeddings: Rounding | None = None

    def of(self, path: Path, shape: Sequence[int]) -> Rounding | None:
        """How a parameter is rounded; None for one that stays plain."""
        if path[0] in ("embed", "head"):
            found = self.embeddings if path[-1] in ("embedding", "kernel") else None
        else:
            is_matrix = path[-1] == "kernel" and path[-2] not in _PLAIN
            found = self.rounding if is_matrix else None
        return found if found and found.group_of(shape[-1]) else None


@dataclasses.dataclass(frozen=True)
class Text:
    """Rows of tokens of a text.

    Attributes:
      calibration: rows by which scales are chosen.
      held_out: rows by which the loss is measured.
    """

    calibration: Int[np.ndarray, "R T"]
    held_out: Int[np.ndarray, "H S"]

    @classmethod
    def of(
        cls, tokens: Sequence[int], before: Sequence[int], config: ModelConfig, limit: int
    ) -> "Text":
        """Makes rows of a text's tokens.

        Args:
          tokens: of the text, without special ones.
          before: the special tokens that a text begins with, which each row is given.
          config: of the model.
          limit: the most tokens of all rows of either kind.

        Raises:
          ValueError: fewer than `LEAST_TOKENS` tokens.
        """
        if len(tokens) < LEAST_TOKENS:
            raise ValueError(
                f"the text has {len(tokens)} tokens, too few to choose scales by and to measure "
                f"with; give one of at least {LEAST_TOKENS}"
            )
        every = np.asarray(tokens, np.int32)
        split = int(len(every) * (1 - _HELD_OUT))
        most = min(LENGTH, config.max_positions) - len(before)
        return cls(*(_rows(part, before, most, limit) for part in (every[:split], every[split:])))


def _rows(
    tokens: np.ndarray, before: Sequence[int], length: int, limit: int
) -> Int[np.ndarray, "R T"]:
    """Rows that are spread over a text."""
    length = min(length, tokens.size)
    count = max(1, min(limit // length, tokens.size // length))
    starts = np.linspace(0, tokens.size - length, count).astype(int)
    rows = tokens[starts[:, None] + np.arange(length)]
    special = np.broadcast_to(np.asarray(before, np.int32), (count, len(before)))
    return np.concatenate([special, rows], axis=1)


@dataclasses.dataclass
class Loss:
    """The cost of quantising on held-out text; perplexities are of a token.

    Attributes:
      tokens: that were predicted.
      before, after: the perplexity of the model, and of the quantised one.
    """

    tokens: int
    before: float
    after: float


class Maker:
    """Quantises one model, once.

    Attributes:
      loss: known after the last parameter, where there is a text.
      matrices: how many matrices are quantised.
      plain: names of those that no group divides, in the order in which they come.
    """

    def __init__(
        self,
        config: ModelConfig,
        making: Making,
        text: Text | None,
        read: ReadSome,
        expected: Mapping[str, ExpectedTensor],
    ):
        """Makes one.

        Args:
          config: of the model.
          making: how it is quantised.
          text: by which scales are chosen; None to choose them by the matrices alone.
          read: yields (name, value) of some of the parameters.
          expected: all parameters, as `read` takes them.

        Raises:
          ValueError: no matrix can be quantised so.
        """
        self.loss: Loss | None = None
        self.matrices, self.plain = 0, list[str]()
        self._config, self._making, self._text = config, making, text
        self._read, self._expected = read, expected
        self._names = {tensor.path: name for name, tensor in expected.items()}
        kernels = [t for t in expected.values() if t.path[-1] == "kernel"]
        if not any(making.of(t.path, t.shape) for t in kernels):
            sizes = sorted({t.shape[-1] for t in kernels})
            raise ValueError(
                f"groups of at most {making.rounding.group} do not divide the inputs of any matrix "
                f"({', '.join(map(str, sizes))}); give another size of groups"
            )

    def parameters(self) -> Iterator[tuple[str, Value]]:
        """Yields (name, value) of each parameter, quantised or not."""
        layers = self._config.num_layers
        with progress.work("quantising", layers, "layers") as work:
            ends = self._part(lambda path: not path[0].startswith("layers_"))
            table = {("embed", "embedding"): ends["embed", "embedding"]}
            made = self._made(ends, {})
            states = self._states(table, made)
            yield from self._named(made, lambda path: path[0] == "embed")
            for layer in range(layers):
                found, states = self._layer(layer, states)
                yield from self._named(found)
                work.update()
        if self._text is not None:
            # The final norm's output is what a head gets.
            self._measure(ends, made, states)
        yield from self._named(made, lambda path: path[0] != "embed")

    def _named(
        self, values: Mapping[Path, Value], chosen: Callable[[Path], bool] = lambda path: True
    ) -> Iterator[tuple[str, Value]]:
        yield from ((self._names[path], v) for path, v in values.items() if chosen(path))

    def _part(self, chosen: Callable[[Path], bool]) -> Weights:
        some = {name: t for name, t in self._expected.items() if chosen(t.path)}
        # Copies, since the arrays of a file cannot be written to.
        return {self._expected[name].path: np.array(v) for name, v in self._read(some)}

    def _made(self, weights: Mapping[Path, np.ndarray], seen: Seen) -> dict[Path, Value]:
        """Parameters with the matrices among them quantised."""
        made = dict[Path, Value]()
        for path, value in weights.items():
            rounding = self._making.of(path, value.shape)
            if rounding is None:
                is_layer = path[0] not in ("embed", "head") and path[-1] == "kernel"
                if is_layer and path[-2] not in _PLAIN:
                    self.plain.append(self._names[path])
                made[path] = value
                continue
            inputs = seen.get(path[1:-1], [])
            made[path] = _quantised(value, rounding, inputs)
            self.matrices += 1 if value.ndim == 2 else len(value)
        return made

    def _states(self, table: Weights, made: Mapping[Path, Value]) -> list[np.ndarray]:
        """The states of the calibration's rows, and of the held-out ones, plain and quantised."""
        if self._text is None:
            return []
        decoder = Decoder(self._config, "xla")
        rows = (self._text.calibration, self._text.held_out, self._text.held_out)
        tables = (table, table, {("embed", "embedding"): made["embed", "embedding"]})
        return [
            np.asarray(decoder.apply({"params": as_params(each)}, tokens, method="_embed"))
            for each, tokens in zip(tables, rows, strict=True)
        ]

    def _layer(
        self, layer: int, states: list[np.ndarray]
    ) -> tuple[dict[Path, Value], list[np.ndarray]]:
        """One layer's parameters, and the states after it."""
        name, form = f"layers_{layer}", self._config.layer_form(layer)
        whole = self._part(lambda path: path[0] == name)
        if self._text is None:
            return self._made(whole, {}), states
        weights = {path[1:]: value for path, value in whole.items()}
        calibration, plain, other = states
        params = as_params(weights)
        calibration, seen = run_layer(self._config, form, params, calibration, watched=True)
        plain, _ = run_layer(self._config, form, params, plain)
        del params

        def fixed(path: Path) -> bool:
            return self._making.of((name, *path), weights[path].shape) is None

        scale_inputs(weights, seen, self._config, self._making.rounding, fixed)
        made = self._made({(name, *path): value for path, value in weights.items()}, seen)
        params = as_params({path[1:]: value for path, value in made.items()})
        other, _ = run_layer(self._config, form, params, other)
        return made, [calibration, plain, other]

    def _measure(
        self, ends: Mapping[Path, np.ndarray], made: Mapping[Path, Value], states: list[np.ndarray]
    ) -> None:
        """Finds the loss by the states after the last layer."""
        assert self._text is not None
        tokens = self._text.held_out
        before, after = (
            math.exp(_mean_loss(self._config, params, rows, tokens))
            for params, rows in ((ends, states[1]), (made, states[2]))
        )
        self.loss = Loss(tokens[:, 1:].size, before, after)


def _quantised(value: np.ndarray, rounding: Rounding, inputs: Sequence[Inputs]) -> QuantisedTensor:
    """A matrix, or those of experts."""
    if value.ndim == 2:
        return rounded(value, rounding, inputs[0].squares if inputs else None)
    found = [
        rounded(matrix, rounding, inputs[expert].squares if inputs else None)
        for expert, matrix in enumerate(value)
    ]
    return jax.tree.map(lambda *parts: np.stack(parts), *found)


def _mean_loss(
    config: ModelConfig, params: Mapping[Path, Value], states: np.ndarray, tokens: np.ndarray
) -> float:
    """The mean of the negative logarithms of the tokens' chances."""
    variables = {"params": as_params(params)}
    total = sum(
        float(_losses(config, variables, states[i : i + ROWS], tokens[i : i + ROWS]))
        for i in range(0, len(states), ROWS)
    )
    return total / tokens[:, 1:].size


def _losses(
    config: ModelConfig, variables: Any, states: Float[np.ndarray, "R T M"], tokens: np.ndarray
) -> jax.Array:
    def logits(decoder: Decoder, states: Any) -> jax.Array:
        return decoder.logits(decoder.norm(states).reshape(-1, states.shape[-1]))

    found: Any = Decoder(config, "xla").apply(variables, jnp.asarray(states[:, :-1]), method=logits)
    after = jnp.asarray(tokens)[:, 1:].reshape(-1, 1)
    chances = jnp.take_along_axis(jax.nn.log_softmax(found), after, axis=-1)
    return -jnp.sum(chances)
