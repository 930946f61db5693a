"""What every client package is put through: a chat, its stream, its message sent back, a call of a tool answered."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from roofline.bench.conform.checks import STORY, expect
from roofline.bench.conform.client import Missing, Skipped, Violation
from roofline.common.json_types import JsonObject

TOOL_NAME = "weather"  # of TOOL
NO_KEY = "none"  # for packages that do not start without a key
MOST_TOKENS = 48
MOST_CALL_TOKENS = 96
NEXT_QUESTION: JsonObject = {"role": "user", "content": "And then?"}
WEATHER: JsonObject = {"role": "user", "content": "What is the weather in Ulm?"}
RESULTS = "21 degrees.", "21 degrees, sunny all day, with a light wind from the west."
NO_ROUTE = frozenset({404, 405, 501})
NO_TOOLS = NO_ROUTE | {400, 422}


@dataclass(frozen=True)
class PackageCall:
    """A call of a tool as a package gives it; id: empty where the API has none."""

    id: str
    name: str
    arguments: object


@dataclass(frozen=True)
class PackageReply:
    """An answer as a package gives it.

    Args:
        message: the package's own object of the assistant's turn, which is sent back as it is.
        prompt_tokens: of the request, None where a package does not tell them.
    """

    text: str
    message: object
    calls: tuple[PackageCall, ...]
    prompt_tokens: int | None


class Package(Protocol):
    """A client package with its settings for one server.

    Attributes:
        route: what its chats are sent to.
        requires_calls: its API can require a call.
    """

    route: str
    requires_calls: bool

    def answer(self, turns: Sequence[object], *, tools: bool = False, required: bool = False) -> PackageReply:
        """The answer to turns, greedy; tools: with TOOL; required: which must be called."""

    def stream(self, turns: Sequence[object], *, tools: bool = False, required: bool = False) -> PackageReply:
        """The same as a stream, put together as the package does."""

    def result(self, call: PackageCall, text: str) -> object:
        """The turn that says what came of a call."""

    def called(self) -> tuple[PackageCall, object]:
        """A call that we write, and the assistant's turn with it; for APIs that cannot require one."""


def package(module: str, name: str) -> ModuleType:
    """A client package. Raises Skipped where it is not installed.

    Args:
        module: to import.
        name: to install it by.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise Skipped(f"package {name} is not installed; pip install {name}") from None
        raise Skipped(f"package {name} cannot be imported: {error}; pip install --force-reinstall {name}") from None
    except ImportError as error:
        raise Skipped(f"package {name} cannot be imported: {error}; pip install --force-reinstall {name}") from None


def chats(client: Package) -> str:
    """Check a chat, the same as a stream, and conversations in which its message is sent back.

    Returns:
        What was seen.

    Raises:
        Violation: where a promise is broken.
        Missing: where the server does not have the API.
    """
    with asking("a chat", client.route, NO_ROUTE):
        answer = client.answer(STORY)
    expect(bool(answer.text), "the answer to a chat has no text")
    with asking("a stream"):
        streamed = client.stream(STORY)
    expect(streamed.text == answer.text, f"{streamed.text!r} is streamed, where {answer.text!r} is the answer")
    with asking("a conversation in plain text"):
        plain = client.answer([*STORY, {"role": "assistant", "content": answer.text}, NEXT_QUESTION])
    for kind, message in (("answer", answer.message), ("stream", streamed.message)):
        with asking(f"the message of the {kind}, sent back"):
            again = client.answer([*STORY, message, NEXT_QUESTION])
        counts = again.prompt_tokens, plain.prompt_tokens
        expect(
            counts[0] == counts[1],
            f"with the message of the {kind} sent back the prompt has {counts[0]} tokens, with its text {counts[1]}",
        )
        before = answer.prompt_tokens
        expect(
            before is None or counts[0] is None or counts[0] > before,
            f"with the message of the {kind} sent back the prompt has {counts[0]} tokens, and {before} without it",
        )
    return f"{len(answer.text)} characters; {plain.prompt_tokens} tokens of prompt with the answer sent back"


def calls_tools(client: Package) -> str:
    """Check a call of a tool, the same as a stream, and that its result is read when it is sent back.

    Returns:
        What was seen.

    Raises:
        Violation: where a promise is broken.
        Missing: where the server does not have the API, or refuses tools.
        Skipped: where the model calls no tool and the API cannot require it.
    """
    with asking("a tool", client.route, NO_TOOLS):
        answer = client.answer([WEATHER], tools=True, required=client.requires_calls)
    if not answer.calls:
        expect(not client.requires_calls, f"no tool is called, though a call is required: {answer.text!r}")
        call, message = client.called()
        _sends_results(client, message, call)
        raise Skipped(
            "the model calls no tool, and this API cannot require it; a call that we wrote was taken with its result. "
            "Name a model that calls tools with --model"
        )
    call = answer.calls[0]
    expect(call.name == TOOL_NAME, f"{call.name!r} is called, which is no tool of the request")
    expect(isinstance(call.arguments, dict), f"the arguments are no JSON object: {call.arguments!r}")
    expect(bool(call.id) or not client.requires_calls, "the call has no id")
    with asking("a call as a stream"):
        streamed = client.stream([WEATHER], tools=True, required=client.requires_calls)
    expect(bool(streamed.calls), f"no tool is called in the stream: {streamed.text!r}")
    expect(
        (streamed.calls[0].name, streamed.calls[0].arguments) == (call.name, call.arguments),
        f"the stream calls {streamed.calls[0].name} with {streamed.calls[0].arguments}, the answer {call.name} with "
        f"{call.arguments}",
    )
    _sends_results(client, answer.message, *answer.calls)
    _sends_results(client, streamed.message, *streamed.calls)
    return f"{call.name} {call.arguments}"


def _sends_results(client: Package, message: object, *calls: PackageCall) -> None:
    """Send a turn with calls back, each with its result. Raises Violation unless the results are in the prompt."""
    counts = []
    for text in RESULTS:
        turns = [WEATHER, message, *(client.result(call, text) for call in calls)]
        with asking("a call with its result, sent back"):
            counts.append(client.answer(turns, tools=True).prompt_tokens)
    short, long = counts
    expect(
        short is None or long is None or short < long,
        f"a longer result of a tool makes the prompt no longer: {short} and {long} tokens",
    )


@contextmanager
def asking(what: str, route: str = "", lacking: frozenset[int] = frozenset()) -> Iterator[None]:
    """Around a call of a package, which may raise whatever it likes: raises Violation instead, or Missing where the
    server answered with one of the statuses `lacking`."""
    try:
        yield
    except (Violation, Missing, Skipped):
        raise
    except ModuleNotFoundError as error:  # litellm imports some of what it needs where it is needed
        raise Skipped(f"{what} needs package {error.name}, which is not installed; pip install {error.name}") from error
    except Exception as error:
        status = getattr(error, "status_code", None)
        words = " ".join(str(error).split())[:300]
        if status in lacking:
            reason = "not offered" if status in NO_ROUTE else f"{what} is refused"
            raise Missing(f"{reason}: POST {route} is answered with status {status}: {words}") from error
        raise Violation(f"{what}: {type(error).__name__}: {words}") from error
