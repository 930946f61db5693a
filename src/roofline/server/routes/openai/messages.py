"""Messages and tools as OpenAI's clients write them -> a conversation as chat templates read it."""

from functools import partial

from roofline.common.errors import RequestError
from roofline.common.json_escapes import parsed
from roofline.server.body import invalid
from roofline.server.conversation import Conversation, check_tools, check_turns
from roofline.server.limits import Limits
from roofline.server.routes.openai.schema import Call, ChatBody, Message, NamedTool, Tool


def conversation_of(body: ChatBody, limits: Limits, *, ended: bool = True) -> Conversation:
    """The conversation of a body. Raises RequestError for messages that say nothing, or do not fit each other.

    ended: nothing follows but the model's answer.
    """
    messages = [turn(number, message) for number, message in enumerate(body.messages)]
    continues = bool(body.continue_final_message)
    if continues and body.messages[-1].tool_calls:
        raise invalid("continue_final_message", "the last message calls tools, and their results must follow")
    broken = {
        (number, place)
        for number, message in enumerate(body.messages)
        for place, call in enumerate(message.tool_calls or ())
        if object_of(call.function.arguments) is None
    }
    check_turns(messages, broken=broken, ended=ended)
    tools = [_tool(tool) for tool in body.tools or ()]
    check_tools(tools, limits)
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is not None and named not in [tool.function.name for tool in body.tools or ()]:
        raise invalid("tool_choice.function.name", "is none of the tools")
    if choice == "required" and not tools:
        raise invalid("tool_choice", "needs tools where one is required")
    if continues and body.messages[-1].role != "assistant":
        raise invalid("continue_final_message", "needs a last message of the assistant")
    if body.add_generation_prompt is not None and body.add_generation_prompt == continues:
        raise invalid("add_generation_prompt", "must be the opposite of continue_final_message")
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=choice if isinstance(choice, str) else "auto",
        named_tool=named,
        strict=frozenset(tool.function.name for tool in body.tools or () if tool.function.strict),
        one_call=body.parallel_tool_calls is False,
        variables=body.chat_template_kwargs or {},
        continues=continues,
    )


def turn(number: int, message: Message) -> dict[str, object]:
    """A message as templates read it. Raises RequestError."""
    role, content, where = message.role, message.content, f"messages.{number}"
    if "content" not in message.model_fields_set and role != "assistant":
        raise RequestError(400, "missing_parameter", f"{where}.content is missing.", param=f"{where}.content")
    for name, of in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and role != of:
            raise invalid(f"{where}.{name}", f"is no field of a message whose role is {role}")
    if role == "tool" and message.tool_call_id is None:
        raise RequestError(400, "missing_parameter", f"{where}.tool_call_id is missing.", param=f"{where}.tool_call_id")
    text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
    is_calls_alone = message.tool_calls and content in (None, [])
    turn: dict[str, object] = {"role": "system" if role == "developer" else role}
    turn["content"] = None if is_calls_alone else text
    thoughts = message.reasoning_content or message.reasoning
    optional = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": thoughts or None}
    turn |= {name: value for name, value in optional.items() if value is not None}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: Call) -> dict[str, object]:
    """Templates write the arguments as JSON themselves, so they get a mapping."""
    function = {"name": call.function.name, "arguments": arguments_of(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def arguments_of(text: str) -> dict[str, object]:
    """The object that the arguments of a call in a history are.

    An answer that was cut off has calls whose arguments are not complete, and a model may write some that are no JSON:
    such a call has none, as the object in Anthropic's and Ollama's answers says of it.
    """
    return object_of(text) or {}


def object_of(text: str) -> dict[str, object] | None:
    """The JSON object that a text is; None if it is none, so that nobody can have executed a call with it."""
    from pydantic_core import from_json

    try:
        value = parsed(text.encode(errors="replace"), partial(from_json, allow_inf_nan=False))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _tool(tool: Tool) -> dict[str, object]:
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
