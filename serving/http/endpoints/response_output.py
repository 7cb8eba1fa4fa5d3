"""The output of a response: its items, and the events by which they are streamed."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.serving.http.generation.chat_answers import AnswerDelta
from jaxshare.serving.http.identities import new_id

Tell = Callable[[str, dict[str, Any]], None]
"""Takes the name of an event, without `response.`, and its fields."""


class OutputWriter:
    """Writes the items of an answer as its pieces come.

    Attributes:
      items: as far as they are written.
    """

    def __init__(self, tell: Tell):
        """Makes a writer that tells of each step."""
        self.items: list[dict[str, Any]] = []
        self._tell, self._kind = tell, ""  # of the open item; "" without one
        self._logprobs: list[dict[str, Any]] = []

    def take(self, delta: AnswerDelta, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        """Takes the next piece.

        Args:
          delta: of one kind.
          logprobs: of the tokens that were sampled since the piece before.
        """
        if delta.thinking:
            self._open("reasoning")
            self._add_text("reasoning_text", delta.thinking, {})
        elif delta.call is None:
            self._open("message")
            self._logprobs += logprobs
            self._add_text("output_text", delta.content, {"logprobs": [*logprobs]})
        else:
            if delta.started:
                self.close()
                self._start_call(*delta.started)
            self._item["arguments"] += delta.arguments
            self._tell("function_call_arguments.delta", {**self._place, "delta": delta.arguments})

    def close(self, status: str = "completed") -> None:
        """Ends the open item, if there is one.

        Args:
          status: "completed", or "incomplete" where the answer was cut off.
        """
        if not self._kind:
            return
        item, kind, self._kind = self._item, self._kind, ""
        item["status"] = status
        if kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            self._tell("function_call_arguments.done", {**self._place, **done})
        elif kind == "message":
            part = item["content"][0]
            part["logprobs"], self._logprobs = self._logprobs, []
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            self._tell("output_text.done", {**self._place, "content_index": 0, **done})
            self._tell("content_part.done", {**self._place, "content_index": 0, "part": {**part}})
        else:
            done = {"text": item["content"][0]["text"]}
            self._tell("reasoning_text.done", {**self._place, "content_index": 0, **done})
        self._tell("output_item.done", {"output_index": len(self.items) - 1, "item": {**item}})

    @property
    def _item(self) -> dict[str, Any]:
        return self.items[-1]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self.items) - 1}

    def _open(self, kind: str) -> None:
        """Opens an item of a kind, unless it is open."""
        if self._kind == kind:
            return
        self.close()
        item: dict[str, Any] = {"id": new_id("msg_"), "type": kind, "status": "in_progress"}
        if kind == "message":
            self._add({**item, "role": "assistant", "content": []}, kind)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._tell("content_part.added", {**self._place, "content_index": 0, "part": {**part}})
        else:
            self._add({**item, "id": new_id("rs_"), "summary": [], "content": []}, kind)
            part = {"type": "reasoning_text", "text": ""}
        self._item["content"].append(part)

    def _start_call(self, call_id: str, name: str) -> None:
        item = {"id": new_id("fc_"), "type": "function_call", "status": "in_progress"}
        self._add({**item, "call_id": call_id, "name": name, "arguments": ""}, "function_call")

    def _add(self, item: dict[str, Any], kind: str) -> None:
        self._kind = kind
        self.items.append(item)
        # A copy: the item grows before the event is written.
        shown = {**item, "content": []} if "content" in item else {**item}
        self._tell("output_item.added", {"output_index": len(self.items) - 1, "item": shown})

    def _add_text(self, name: str, text: str, more: dict[str, Any]) -> None:
        self._item["content"][0]["text"] += text
        self._tell(f"{name}.delta", {**self._place, "content_index": 0, "delta": text, **more})
