"""SelfRefine: who gives the feedback, when it stops, and what is in the dialogue (Madaan et al.)."""

import asyncio

import pytest

from jaxshare.serving.agents import AgentError, Message, Reply, Runtime, SelfRefine, agent, llm
from tests.serving.agents.test_search import BranchError


class Writer:
    """Writes drafts in order, and gives feedback in order where it is asked for that."""

    def __init__(self, drafts, feedback=()):
        self.drafts, self.feedback, self.calls = [*drafts], [*feedback], []

    async def answer(self, call):
        self.calls.append(call)
        texts = self.feedback if call.agent in ("gives_feedback", "critic") else self.drafts
        text = texts.pop(0)
        if text == "fail":
            raise BranchError(text)
        return Reply(text)


@agent
async def writes():
    return await llm("write")


@agent
async def critic(judged):
    said = await llm(f"judge {judged.value}")
    return None if said == "fine" else said


def refined(supervisor, drafts, feedback=()):
    model = Writer(drafts, feedback)
    return asyncio.run(Runtime(model).run(writes.under(supervisor))), model.calls


def turns(*texts):
    """Messages of the user, those of the assistant marked by an equals sign."""
    return tuple(
        Message("assistant", text[1:]) if text.startswith("=") else Message("user", text)
        for text in texts
    )


def test_the_model_gives_feedback_in_the_dialogue():
    done, calls = refined(SelfRefine("What is wrong?"), ["one", "two", "three"], ["short", "dull"])
    assert done.accepted.value == "three"  # without a value, the last
    history = turns("write", "=one", "What is wrong?", "=short", "write", "=two", "What is wrong?")
    lengths = (1, 3, 5, 7)
    assert [call.messages for call in calls[:4]] == [history[:length] for length in lengths]
    assert calls[4].messages == (*history, *turns("=dull", "write"))
    assert [call.agent for call in calls] == ["writes", "gives_feedback"] * 2 + ["writes"]
    assert done.accepted.dialogue == (*history, *turns("=dull", "write", "=three"))


def test_an_agent_gives_feedback():
    done, calls = refined(SelfRefine(critic, rounds=5), ["one", "two", "three"], ["a", "b", "fine"])
    assert done.accepted.value == "three" and len(calls) == 6
    assert calls[-2].messages == turns("write", "=one", "a", "write", "=two", "b", "write")
    assert calls[-1].messages == turns("judge three")
    assert [child.agent.name for child in done.children] == ["critic"] * 3


def test_a_function_gives_feedback_until_it_has_none():
    def feedback(state):
        return None if state.value == "two" else f"{state.value} is bad"

    done, calls = refined(SelfRefine(feedback, rounds=9), ["one", "two", "three"])
    assert done.accepted.value == "two"
    assert calls[-1].messages == turns("write", "=one", "one is bad", "write")


@pytest.mark.parametrize("source", ["Judge it.", critic])
def test_the_feedback_itself_can_stop_it(source):
    supervisor = SelfRefine(source, rounds=9, until=lambda text: "nothing" in text)
    done, _ = refined(supervisor, ["one", "two", "three"], ["bad", "there is nothing to change"])
    assert done.accepted.value == "two"


def test_a_value_chooses_the_best_and_stops_it():
    def value(state):
        return {"one": 0.6, "two": 0.3, "three": 0.9, "four": 1.0}[state.value]

    done, _ = refined(SelfRefine("More?", value, 3), ["one", "two"], ["x", "fail"])
    assert done.accepted.value == "one"
    done, _ = refined(SelfRefine("More?", value, 3), ["one", "two", "three"], "xyz")
    assert done.accepted.value == "three"
    done, calls = refined(SelfRefine("More?", value, 9, 0.9), ["one", "three", "four"], "xyz")
    assert done.accepted.value == "three" and len(calls) == 3
    stops = SelfRefine("More?", value, until=lambda text: text == "stop")
    done, _ = refined(stops, ["one", "two"], ["go on", "stop"])
    assert done.accepted.value == "one"  # the best, not the last


@pytest.mark.parametrize(
    ("source", "feedback"), [("More?", ["fail"]), (critic, ["fail"]), (lambda state: 1 / 0, [])]
)
def test_feedback_that_fails_leaves_the_rounds_before_and_its_error_in_the_tree(source, feedback):
    done, _ = refined(SelfRefine(source), ["one", "two"], feedback)
    assert done.accepted.value == "one"
    [failed] = [state for state in done.states if state.error]
    assert failed.parent is done.accepted
    assert "in the feedback of SelfRefine, the supervisor of agent writes" in "".join(
        failed.error.__notes__
    )


def test_feedback_is_a_text():
    done, _ = refined(SelfRefine(lambda state: 3), ["one"])  # type: ignore[arg-type,return-value]
    [failed] = [state for state in done.states if state.error]
    assert isinstance(failed.error, AgentError)
    assert str(failed.error) == "the feedback is 3; give a text, or None to stop"
    with pytest.raises(TypeError, match="feedback is None; give a function of a state, an agent"):
        SelfRefine(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rounds is 0"):
        SelfRefine("x", rounds=0)
