"""A conversation to be answered, whichever API it came by, and the prompt it becomes."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256

from roofline.engine.constraint import Constraint
from roofline.server.beginnings import Beginning, beginning_of
from roofline.server.body import count_within, invalid, renamed
from roofline.server.call_grammars import describes_object, forced_calls, optional_calls, schema_of_calls
from roofline.server.efforts import EFFORTS, template_effort, thinking_switch
from roofline.server.limits import Limits
from roofline.server.text_side import TextSide
from roofline.server.unanswered import UnansweredCalls
from roofline.text.replies.begun_reply import BegunReply
from roofline.text.replies.escapes import WholeEscapes
from roofline.text.replies.parser import FirstCall, ReplyParser

Message = Mapping[str, object]
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


@dataclass(frozen=True)
class Conversation:
    """Messages and tools as chat templates read them.

    Args:
        messages: mappings with role and content (a text, or None beside calls). An assistant's may have
            `reasoning_content` and `tool_calls`, whose `function` has a name and arguments as a mapping; a tool's has
            `tool_call_id`.
        tools: {"type": "function", "function": {"name", "description", "parameters"}}.
        tool_choice: "auto"; "none" leaves the tools out of the prompt; "required": the answer calls one at least.
        named_tool: the answer is a call of this one.
        strict: names of tools whose calls are held to their schemas also where the answer may be text.
        one_call: an answer has at most one call; of more, the first is kept.
        variables: further ones of the chat template.
        continues: the last message is the assistant's, and the answer goes on from it.
    """

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    tool_choice: str = "auto"
    named_tool: str | None = None
    strict: frozenset[str] = frozenset()
    one_call: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)
    continues: bool = False


@dataclass(frozen=True)
class ChatPrompt:
    """The ids of a conversation, what its answers are taken apart by, the special tokens that this looks for, and what
    the answers are held to."""

    ids: Sequence[int]
    parser: Callable[[], ReplyParser]
    shown: frozenset[int]
    constraint: Constraint | None = None


def prompt_of(
    conversation: Conversation, text: TextSide, room: int | None, answer_form: Constraint | None = None
) -> ChatPrompt:
    """The prompt of a conversation. room: tokens of the context; answer_form: what the API asks the answers to have.
    Raises RequestError."""
    tools = () if conversation.tool_choice == "none" else conversation.tools
    ids = text.encode_chat(
        results_in_order(conversation.messages),
        room,
        tools=tools,
        variables=conversation.variables,
        continues=conversation.continues,
    )
    schemas = {_function(tool)["name"]: _function(tool).get("parameters") for tool in tools}
    content = str(conversation.messages[-1].get("content") or "") if conversation.continues else None
    form, beginning = text.reply_format, beginning_of(ids, content, text)
    shown = text.special_ids(form.marks(tools=bool(tools)))

    def parser() -> ReplyParser:
        parser: ReplyParser = form.parser(schemas, thinking=beginning.thinking)
        parser = BegunReply(parser, beginning.text) if beginning.text else parser
        parser = WholeEscapes(parser) if tools else parser
        return FirstCall(parser) if conversation.one_call else parser

    if answer_form is not None:
        return ChatPrompt(ids, parser, shown, beginning.held_to(answer_form))
    _check_schemas(conversation, tools)
    with renamed({"constraint": "tools"}):
        constraint = _call_grammar(conversation, tools, text, beginning)
    return ChatPrompt(ids, parser, shown, constraint)


def _check_schemas(conversation: Conversation, tools: Sequence[Message]) -> None:
    """Raises RequestError with the place of a tool whose calls have to be held to its schema, and cannot be."""
    forced = conversation.tool_choice == "required"
    for number, tool in enumerate(tools):
        name = _function(tool)["name"]
        if forced or name == conversation.named_tool or name in conversation.strict:
            with renamed({"constraint": parameters_field(number)}):
                schema_of_calls(tool)


def _call_grammar(
    conversation: Conversation, tools: Sequence[Message], text: TextSide, beginning: Beginning
) -> Constraint | None:
    """What the answers to a conversation are held to; None: nothing. tools: those that the prompt tells."""
    required = conversation.tool_choice == "required" or conversation.named_tool is not None
    if not tools or not (required or conversation.strict):
        return None
    form, several = text.reply_format, conversation.named_tool is None and not conversation.one_call
    special_ids = {mark: token for mark in form.marks(tools=True) for token in text.special_ids(frozenset({mark}))}
    if required:
        tools = [tool for tool in tools if conversation.named_tool in (None, _function(tool)["name"])]
        grammar = partial(forced_calls, form.calls, tools)
    else:
        grammar = partial(optional_calls, form.calls, tools, conversation.strict)
    constraint = grammar(
        several=several, thinking=beginning.spoken is None, thoughts=form.thoughts, special_ids=special_ids
    )
    return replace(constraint, begun=beginning.text if beginning.spoken is None else beginning.spoken)


def call_id(answer: str, index: int, number: int) -> str:
    """What a call of a tool is named by, in choice `index` of an answer: nine letters and digits, as Mistral's
    templates ask for."""
    return sha256(f"{answer} {index} {number}".encode()).hexdigest()[:9]


def effort_variables(field: str, effort: str | None, text: TextSide, *, switches: bool = True) -> dict[str, object]:
    """What a chat template is told of how much the model is to think, where it knows of that.

    field: what the API calls it; switches: "none" turns thinking off, and all else on. Raises RequestError for a word
    that means nothing.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise invalid(field, f"must be one of {', '.join(EFFORTS)}")
    source = text.template.source
    degree, switch = template_effort(source, effort), thinking_switch(source) if switches else None
    variables: dict[str, object] = {} if degree is None else {"reasoning_effort": degree}
    return variables | ({} if switch is None else {switch: effort != "none"})


def check_tools(tools: Sequence[Message], limits: Limits) -> None:
    """Raises RequestError for more tools than allowed, for names that calls cannot tell apart, and for parameters that
    are no object, which a call cannot have."""
    count_within("tools", len(tools), 0, limits.tools)
    seen = set[str]()
    for number, tool in enumerate(tools):
        where, name = f"tools.{number}.function.name", _function(tool)["name"]
        if not 1 <= len(name) <= limits.tool_name_characters or not NAME_CHARACTERS.issuperset(name):
            most = limits.tool_name_characters
            raise invalid(where, f"must be 1 to {most} letters, digits, underscores, hyphens or dots")
        if name in seen:
            raise invalid(where, f"{name!r} is there twice")
        seen.add(name)
        if not describes_object(_function(tool).get("parameters")):
            problem = 'must describe an object, as in {"type": "object", "properties": {"city": {"type": "string"}}}'
            raise invalid(parameters_field(number), f"{problem}: arguments of calls have names")


def parameters_field(number: int) -> str:
    """What errors call the parameters of a tool; APIs that call them otherwise rename it."""
    return f"tools.{number}.function.parameters"


def flat_tool_fields(count: int, parameters: str) -> dict[str, str]:
    """Names of fields of tools, for `renamed`, in an API whose tools have no `function`. parameters: what it calls
    those."""
    names = {f"tools.{number}.function.name": f"tools.{number}.name" for number in range(count)}
    return names | {parameters_field(number): f"tools.{number}.{parameters}" for number in range(count)}


def results_in_order(messages: Sequence[Message]) -> list[Message]:
    """Put the results behind calls in the order of the calls: most templates tell which is which by place alone."""
    ordered: list[Message] = []
    places: dict[object, int] = {}
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            places = {call.get("id"): place for place, call in enumerate(calls)}
        at = len(ordered)
        if message.get("role") == "tool":
            place = places.get(message.get("tool_call_id"), len(places))
            while at > 0 and ordered[at - 1].get("role") == "tool":
                if places.get(ordered[at - 1].get("tool_call_id"), len(places)) <= place:
                    break
                at -= 1
        ordered.insert(at, message)
    return ordered


def check_turns(messages: Sequence[Message], *, broken: Container[tuple[int, int]] = (), ended: bool = True) -> None:
    """Raises RequestError for the answer of a tool that nobody called, and for a call that has none or several.

    broken: numbers of messages and of calls in them whose arguments are no object, which need no answer; ended: nothing
    follows but the model's answer, so that no result is still to come.
    """
    unanswered = UnansweredCalls("a message of role tool with this tool_call_id")
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            field = f"messages.{number}.tool_calls.{place}.id"
            unanswered.call(str(call.get("id")), field, cut=(number, place) in broken)
        if message.get("role") == "tool":
            unanswered.answer(str(message.get("tool_call_id")), f"messages.{number}.tool_call_id")
    if ended:
        unanswered.check()


def _function(tool: Message) -> Mapping[str, str]:
    function = tool["function"]
    assert isinstance(function, Mapping), "the reader of the API has checked it"
    return function
