"""Running an agent by itself, from code that has no event loop."""

import asyncio
from typing import Any

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.requests import Model
from jaxshare.serving.agents.runs import AgentRun
from jaxshare.serving.agents.runtime import Runtime


def run(agent: Agent, /, *args: Any, model: Model, seed: int = 0, **kwargs: Any) -> Any:
    """Runs an agent to its end and returns its value; see `Runtime` and `Runtime.run`."""

    async def whole_run() -> AgentRun:
        return await Runtime(model, seed=seed).run(agent, *args, **kwargs)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        accepted = asyncio.run(whole_run()).accepted
    else:
        raise RuntimeError(
            "run() begins an event loop, and here one is running, as in a notebook: (await "
            "Runtime(model).run(agent, ...)).accepted.value is the same there"
        )
    assert accepted
    return accepted.value
