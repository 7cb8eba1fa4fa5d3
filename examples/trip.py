"""An agent whose model looks up trains with tools, and answers with an object that is checked.

    jaxshare agents run examples/trip.py
    jaxshare agents run examples/trip.py --model Qwen/Qwen3-4B
    jaxshare agents run examples/trip.py -- Bergen 12:00

The model may call two functions as often as it needs them. Their results come back to it as messages.
Then it gives a `Trip`: its text is JSON of the schema of that class, and a journey that the timetable
does not have is refused, with another attempt. Without `--model` the answers are scripted: no model
is run.
"""

import dataclasses
import json

from jaxshare.serving.agents import agent, llm
from jaxshare.serving.agents.backends import ScriptedModel

TRAINS = {
    ("Oslo", "Bergen"): {"06:25": "13:01", "08:25": "15:10", "12:03": "18:55"},
    ("Oslo", "Trondheim"): {"08:02": "14:40", "14:02": "20:44"},
}
"""The times of departure and arrival, by start and end."""
RAIN = {"Bergen": True, "Trondheim": False}


def trains(start: str, end: str) -> dict[str, str]:
    """Tells when trains leave and arrive.

    Args:
      start: the city where they leave.
      end: the city where they arrive.
    """
    return TRAINS[start, end]


async def rains(city: str) -> bool:
    """Tells whether it will rain tomorrow.

    Args:
      city: its name.
    """
    return RAIN[city]


@dataclasses.dataclass(frozen=True)
class Trip:
    """A journey by train.

    Attributes:
      end: the city where it ends.
      leaves: the time of departure, such as 08:25.
      arrives: the time of arrival.
      umbrella: whether an umbrella is needed.
    """

    end: str
    leaves: str
    arrives: str
    umbrella: bool

    def __post_init__(self):
        if TRAINS.get(("Oslo", self.end), {}).get(self.leaves) != self.arrives:
            raise ValueError(f"no train to {self.end} leaves at {self.leaves} and is there then")


@agent
async def plan(end, latest):
    """The last train from Oslo that arrives in time."""
    asked = f"I have to be in {end} by {latest} tomorrow. Which train from Oslo, and will it rain?"
    await llm(asked, tools=[trains, rains], max_new_tokens=512)
    return await llm(
        "Give that as an object.",
        returns=Trip,
        retries=2,
        chat_template_kwargs={"enable_thinking": False},
    )


# What `jaxshare agents run` looks for.

AGENT, MODEL = plan, "scripted"


def arguments(args: list[str]):
    if args and len(args) != 2:
        raise ValueError(f"give a city and a time, such as Bergen 16:00, not {' '.join(args)}")
    return args or ("Bergen", "16:00")


def shown(trip: Trip) -> str:
    umbrella = "with" if trip.umbrella else "without"
    return f"Oslo {trip.leaves}, {trip.end} {trip.arrives}, {umbrella} an umbrella"


def scripted() -> ScriptedModel:
    """Answers about the journey to Bergen by 16:00; the first object has a train that there is not."""
    calls = [
        {"name": "trains", "arguments": {"start": "Oslo", "end": "Bergen"}},
        {"name": "rains", "arguments": {"city": "Bergen"}},
    ]
    written = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    trip = {"end": "Bergen", "leaves": "08:25", "arrives": "16:00", "umbrella": True}
    return ScriptedModel(
        {
            "by 16:00": f"<think>\nI need the timetable.\n</think>\n\n{written}",
            "true": "The 08:25 is there at 15:10, and it rains.",
            "as an object": [json.dumps(trip), json.dumps(trip | {"arrives": "15:10"})],
        }
    )
