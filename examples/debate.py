"""Two agents debate a question; a third one leads them, judges, and is searched as a tree.

    jaxshare agents run examples/debate.py
    jaxshare agents run examples/debate.py --model Qwen/Qwen3-8B -- Should cities ban cars?

A debater is a child that yields what it says and is resumed with what the other one has said. The
moderator asks the model after each turn who leads. Its states are searched: two verdicts are tried
after every turn, and each goes on with debaters of its own, which are forked where they are told
different things and share all that they have said before.
"""

import re

from jaxshare.serving.agents import TreeOfThoughts, agent, current_dialogue, llm, spawn
from jaxshare.serving.agents.backends import ScriptedModel

TURNS = 2


@agent
async def debater(question, side):
    """Speaks for one side, turn after turn; remembers the question and the last turns alone."""
    mine = current_dialogue()
    mine.append({"role": "system", "content": f"You debate: {question} You speak {side}."})
    heard = "Begin."
    while True:
        heard = yield await llm(heard, max_new_tokens=120)
        if len(mine) > 5:
            mine.drop(slice(1, -2))


def certain(state):
    """How certain the last verdict is, which the model gives in percent."""
    said = re.findall(r"(\d+)\s*%", " ".join(one.content for one in state.dialogue[-1:]))
    return float(said[-1]) if said else 0.0


@agent(supervisor=TreeOfThoughts(2, 1, value=certain))
async def debate(question):
    """Leads a debate; returns the verdicts."""
    sides = [spawn(debater, question, "for it"), spawn(debater, question, "against it")]
    said, verdicts = ["Begin.", "Begin."], []
    for turn in range(TURNS):
        said = [await side.next() for side in sides]
        asked = f"Turn {turn + 1}.\nFor: {said[0]}\nAgainst: {said[1]}\nWho leads, and how certain?"
        verdicts.append(await llm(asked, max_new_tokens=60))
        for side, other in zip(sides, reversed(said), strict=True):
            side.resume(f"{verdicts[-1]} The other side says: {other}")
    return verdicts


# What `jaxshare agents run` looks for.

AGENT, MODEL = debate, "scripted"


def arguments(args: list[str]):
    return [" ".join(args) or "Should the town build a bridge?"]


def shown(verdicts: list[str]) -> str:
    return "\n".join(f"turn {turn}: {verdict}" for turn, verdict in enumerate(verdicts, 1))


def scripted() -> ScriptedModel:
    return ScriptedModel(
        {
            "Begin.": lambda call: (
                "It saves an hour a day."
                if "for it" in call.messages[0].content
                else "It costs too much."
            ),
            "Turn 1": ["The first side leads, 55%.", "The second side leads, 70%."],
            "Turn 2": ["The first side leads, 80%.", "Neither leads, 50%."],
            "The second side leads": lambda call: (
                "The toll pays for it in ten years."
                if "for it" in call.messages[0].content
                else "An hour is saved by few."
            ),
            "The first side leads": "As I said.",
        }
    )
