"""Tools for models whose chat template knows none: told in the system message, called and answered as plain text."""

import json
from collections.abc import Mapping, Sequence

from roofline.text.replies.formats.hermes import HermesCalls

Message = Mapping[str, object]
OPEN, CLOSE = HermesCalls.open, HermesCalls.close


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """The same conversation without tools, tool messages and calls. The format is that of `HermesCalls`.

    Results in a row, and what the user says right behind them, are one turn of the user's: many templates want roles to
    alternate.
    """
    plain: list[Message] = []
    behind_result = False
    for message in messages:
        turn, is_result = _as_text(message), message.get("role") == "tool"
        behind_result = behind_result and turn.get("role") == "user"
        if behind_result:
            turn = {**turn, "content": f"{plain.pop()['content']}\n{turn.get('content') or ''}"}
        plain.append(turn)
        behind_result = behind_result or is_result
    if not tools:
        return plain
    told = _instructions(tools)
    if plain and plain[0].get("role") == "system":
        return [{**plain[0], "content": f"{plain[0].get('content') or ''}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _instructions(tools: Sequence[Message]) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, each given as a JSON schema:\n<tools>\n{functions}\n</tools>\n"
        f"To call one, write an object with its name and arguments between marks:\n{OPEN}\n"
        '{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n'
        f"{CLOSE}\nIts result follows between <tool_response> and </tool_response>. Otherwise answer in text."
    )


def _as_text(message: Message) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    texts = [str(message["content"])] if message.get("content") else []
    texts += [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
    return {"role": message["role"], "content": "\n".join(texts)}
