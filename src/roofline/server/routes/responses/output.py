"""A reply as the items of a response, and the events that build them."""

from collections.abc import Iterable

from roofline.common.json_types import JsonObject
from roofline.server.conversation import call_id
from roofline.text.replies.parser import CallDelta, Delta, ReasoningDelta, TextDelta

PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}  # of ids
CONTENT_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}  # of the parts of items


class ResponseItems:
    """Items: one for each stretch of thought, of text, and for each call, in their order.

    answer: the id of the answer, which those of items are made of.
    """

    def __init__(self, answer: str) -> None:
        self.items: list[JsonObject] = []
        self._answer = answer
        self._open: type[Delta] | int | None = None  # what the last item is of: a type of deltas, or a call's number
        self._texts: list[str] = []  # of that item

    @property
    def thinks(self) -> bool:
        """Whether there is an item of reasoning."""
        return any(item["type"] == "reasoning" for item in self.items)

    def add(self, deltas: Iterable[Delta]) -> list[JsonObject]:
        """Takes more of the reply; returns the events that say so."""
        events: list[JsonObject] = []
        for delta in deltas:
            key = delta.number if isinstance(delta, CallDelta) else type(delta)
            if key != self._open:
                events += self.close()
                self._open = key
                events += self._begin(delta)
            text = delta.arguments if isinstance(delta, CallDelta) else delta.text
            if text:
                self._texts.append(text)
                events.append(self._event(f"{self._part}.delta", delta=text, **self._more()))
        return events

    def close(self, status: str = "completed") -> list[JsonObject]:
        """Ends the item that is open, if one is."""
        if self._open is None:
            return []
        item, text = self.items[-1], "".join(self._texts)
        self._open, self._texts = None, []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("function_call_arguments.done", arguments=text, name=item["name"])]
        else:
            part = self._content(text)
            item["content"] = [part]
            ended = self._event("content_part.done", content_index=0, part=part)
            events = [self._event(f"{self._part}.done", text=text, **self._more()), ended]
        return [*events, self._item_event("output_item.done")]

    def _begin(self, delta: Delta) -> list[JsonObject]:
        kind = {TextDelta: "message", ReasoningDelta: "reasoning", CallDelta: "function_call"}[type(delta)]
        name = f"{PREFIXES[kind]}_{self._answer}{len(self.items)}"
        item: JsonObject = {"id": name, "type": kind, "status": "in_progress"}
        if isinstance(delta, CallDelta):
            item |= {"call_id": call_id(self._answer, 0, delta.number), "name": delta.name or "", "arguments": ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self.items.append(item)
        events = [self._item_event("output_item.added")]
        if kind != "function_call":
            events.append(self._event("content_part.added", content_index=0, part=self._content("")))
        return events

    @property
    def _part(self) -> str:
        """What the events of the open item are named by."""
        return CONTENT_NAMES.get(self.items[-1]["type"], "function_call_arguments")

    def _more(self) -> JsonObject:
        """What the events of texts have beside those of arguments."""
        logprobs: JsonObject = {"logprobs": []} if self._part == "output_text" else {}
        return {} if self._part == "function_call_arguments" else {"content_index": 0, **logprobs}

    def _content(self, text: str) -> JsonObject:
        more: JsonObject = {"annotations": [], "logprobs": []} if self._part == "output_text" else {}
        return {"type": self._part, "text": text, **more}

    def _event(self, kind: str, **fields: object) -> JsonObject:
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}

    def _item_event(self, kind: str) -> JsonObject:
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, "item": dict(self.items[-1])}
