"""Values of a type from an engine: the grammar makes every answer one, whatever the model knows."""

import dataclasses
from typing import Literal

from jaxshare import Sampler
from jaxshare.serving.agents import agent, llm, run
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.engine import Engine
from tests.helpers import one_layer


@dataclasses.dataclass(frozen=True)
class Size:
    wide: int
    unit: Literal["cm", "m"]


@dataclasses.dataclass(frozen=True)
class Box:
    colour: Literal["red", "green"]
    size: Size
    is_open: bool | None


@agent
async def measure():
    return await llm("What is the box like?", returns=Box, max_new_tokens=400, retries=3)


def test_every_answer_is_an_object_of_the_class():
    with Engine(one_layer(), max_rows=4) as engine:
        model = EngineModel(engine, sampler=Sampler(1.0))
        boxes = [run(measure, model=model, seed=seed) for seed in range(4)]
    assert all(isinstance(box, Box) for box in boxes)
    assert all(isinstance(box.size, Size) and isinstance(box.size.wide, int) for box in boxes)
    assert {box.colour for box in boxes} <= {"red", "green"}
