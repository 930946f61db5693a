"""Messages and tools as Anthropic's clients write them -> a conversation as chat templates read it."""

from collections.abc import Iterable, Iterator, Sequence

from roofline.common.errors import RequestError
from roofline.server.body import invalid, renamed
from roofline.server.conversation import Conversation, check_tools, flat_tool_fields
from roofline.server.limits import Limits
from roofline.server.routes.anthropic.schema import (
    Message,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from roofline.server.unanswered import UnansweredCalls

Turn = dict[str, object]
CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "auto"}  # ours, beside the name of a tool


def conversation_of(body: PromptBody, limits: Limits) -> Conversation:
    """The conversation of a body. Raises RequestError for blocks that do not fit their messages or each other."""
    turns = list(_joined_turns(_turns(body)))
    last = turns[-1]
    continues = last["role"] == "assistant"
    if continues and "tool_calls" in last:
        raise invalid("messages", "the last one calls tools, and their results must follow")
    tools = [_tool(tool) for tool in body.tools or ()]
    with renamed(flat_tool_fields(len(tools), "input_schema")):
        check_tools(tools, limits)
    choice, thinking = body.tool_choice, body.thinking
    if choice is not None:
        _check_choice(choice, body.tools or ())
    return Conversation(
        messages=turns,
        tools=tools,
        tool_choice="auto" if choice is None else CHOICES[choice.type],
        named_tool=choice.name if choice is not None else None,
        strict=frozenset(tool.name for tool in body.tools or () if tool.strict),
        one_call=choice is not None and choice.disable_parallel_tool_use is True,
        variables={} if thinking is None else {"enable_thinking": thinking.type != "disabled"},
        continues=continues,
    )


def _check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid("tool_choice.name", 'belongs to the type "tool"')
    if choice.name is not None and choice.name not in [tool.name for tool in tools]:
        raise invalid("tool_choice.name", "is none of the tools")
    if choice.type == "any" and not tools:
        raise invalid("tool_choice", "needs tools where one is to be called")


def _tool(tool: Tool) -> Turn:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _turns(body: PromptBody) -> Iterator[Turn]:
    """The system prompt, and one or several turns for each message: results of tools are turns of their own."""
    if body.system is not None:
        yield {"role": "system", "content": _text(body.system)}
    called: dict[str, str] = {}  # names of tools by the ids of their calls
    unanswered = UnansweredCalls("a block of type tool_result with this tool_use_id")
    for number, message in enumerate(body.messages):
        _check_roles(number, message)
        content = message.content or []
        if isinstance(content, str):
            content = [TextBlock(type="text", text=content)]
        for at, block in enumerate(content):
            if isinstance(block, ToolUseBlock):
                called[block.id] = block.name
                unanswered.call(block.id, f"messages.{number}.content.{at}.id")
            elif isinstance(block, ToolResultBlock):
                unanswered.answer(block.tool_use_id, f"messages.{number}.content.{at}.tool_use_id")
                yield _result(block, called[block.tool_use_id])
        if any(not isinstance(block, ToolResultBlock) for block in content) or not content:
            yield _turn(message.role, content)
    if not (body.messages[-1].role == "assistant" and _has_calls(body.messages[-1])):  # which `conversation_of` refuses
        unanswered.check()


def _has_calls(message: Message) -> bool:
    return not isinstance(message.content, str) and any(isinstance(b, ToolUseBlock) for b in message.content or ())


def _check_roles(number: int, message: Message) -> None:
    """Raises RequestError for blocks that this role does not write."""
    if isinstance(message.content, str):
        return
    for at, block in enumerate(message.content or ()):
        role = "user" if isinstance(block, ToolResultBlock) else "assistant"
        if not isinstance(block, TextBlock) and message.role != role:
            field = f"messages.{number}.content.{at}.type"
            raise invalid(field, f"a message of the {message.role}'s has no blocks of type {block.type}")


def _result(block: ToolResultBlock, name: str) -> Turn:
    text = ("Error: " if block.is_error else "") + _text(block.content or "")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text}


def _turn(role: str, content: Iterable[object]) -> Turn:
    blocks = list(content)
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thinking = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    turn: Turn = {"role": role, "content": None if calls and not texts else _text(texts)}
    return turn | ({"reasoning_content": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})


def _joined_turns(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Turns of one role that follow each other as one turn; results of tools stay apart."""
    last: Turn | None = None
    for turn in turns:
        if last is None or last["role"] != turn["role"] or turn["role"] == "tool":
            if last is not None:
                yield last
            last = turn
            continue
        for name in ("content", "reasoning_content"):
            texts = [str(text) for text in (last.get(name), turn.get(name)) if text]
            if texts:
                last[name] = "\n".join(texts)
        calls = [call for each in (last, turn) for call in _calls(each)]
        last |= {"tool_calls": calls} if calls else {}
    if last is not None:
        yield last


def _calls(turn: Turn) -> list[object]:
    calls = turn.get("tool_calls", [])
    assert isinstance(calls, list), "_turn made it"
    return calls


def _text(content: str | Iterable[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def refuse_unreadable(fields: dict[str, object], kinds: frozenset[str]) -> None:
    """Raises RequestError for blocks of kinds that no model served here reads, by their place."""
    messages = fields.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        _refuse_blocks(message, f"messages.{i}", kinds)


def _refuse_blocks(holder: object, place: str, kinds: frozenset[str]) -> None:
    content = holder.get("content") if isinstance(holder, dict) else None
    for j, block in enumerate(content if isinstance(content, list) else ()):
        kind, field = block.get("type") if isinstance(block, dict) else None, f"{place}.content.{j}"
        if isinstance(kind, str) and kind in kinds:
            problem = f"{field}: the model reads text, and no blocks of type {kind}."
            raise RequestError(400, "unsupported_parameter", problem, param=field)
        if kind == "tool_result":
            _refuse_blocks(block, field, kinds)
