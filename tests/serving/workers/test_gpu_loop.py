"""The decode loop in the form that a GPU runs, in which conditionals take the place of loops of one
iteration, against the form that a CPU runs: both on this machine."""

import dataclasses

import pytest

from jaxshare.models.layers import Decoder
from jaxshare.models.loading import LoadedModel
from jaxshare.pallas.device import Device, assume_device
from jaxshare.serving import Workers
from tests.helpers import mostly_slow
from tests.serving.workers.test_session import BUDGET, CHAT, NAMES, endless, model, problem, run

GPU = Device("interpreted", 90, 3, interpret=True)


@dataclasses.dataclass(frozen=True, eq=False)
class XlaModel(LoadedModel):
    """A model whose attention and products are XLA's on a GPU, too."""

    @property
    def module(self):
        return Decoder(self.config, "xla")


def session(layout: str, **options) -> Workers:
    base = model()
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return Workers(
        XlaModel(**fields),
        problem().prompt(),
        names=NAMES,
        layout=layout,
        budget=BUDGET,
        sampler=endless(),
        max_workers=3,
        format=CHAT,
        seed=3,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ask_every"), mostly_slow([("combined", 20), ("interleaved", 0)], several=True)
)
def test_workers_write_the_same_where_conditionals_take_the_place_of_loops(layout, ask_every):
    """Sessions with steps that move, openings in wide passes and questions."""
    expected = run(session(layout, ask_every=ask_every))
    with assume_device(GPU):
        found = session(layout, ask_every=ask_every)
        assert run(found) == expected
    assert any(step.ended for step in found.steps), "no step has ended"
    assert any(step.asked for step in found.steps) == bool(ask_every)
