"""A client that takes nothing for granted: raw requests, and streams as the bytes they are."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from roofline.common.json_types import JsonObject

CHAT, TEXT, RESPONSES = "/chat/completions", "/completions", "/responses"


class Violation(Exception):
    """The server did something else than it promises; the message says what."""


class Missing(Exception):
    """The server says that it does not have this."""


class Skipped(Exception):
    """This could not be checked here; the message says why, and what to do."""


@dataclass
class ConformChoice:
    """One choice, of a complete answer or put together from the events of a stream."""

    text: str = ""
    finish_reason: str | None = None
    calls: dict[int, JsonObject] = field(default_factory=dict)  # by their index: id, name, arguments
    tokens: bytes = b""  # the bytes of its log-probabilities' tokens, one after the other


@dataclass
class ConformAnswer:
    """The choices of an answer by their index, and what it is billed."""

    choices: dict[int, ConformChoice]
    usage: JsonObject | None

    @property
    def first(self) -> ConformChoice:
        if 0 not in self.choices:
            raise Violation("the answer has no choice of index 0")
        return self.choices[0]


class Server:
    """A server under test.

    Args:
        url: of the API, with or without /v1.
        seconds: that any one request may take.
    """

    def __init__(self, url: str, model: str | None, key: str | None, seconds: float) -> None:
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self.key = key
        headers = self.authorization
        # A connection for each request: one that a server closes after a refusal does not fail the next check.
        self.http = httpx.Client(headers=headers, timeout=seconds, limits=httpx.Limits(max_keepalive_connections=0))
        self.seconds = seconds
        self.model = model or ""

    @property
    def root(self) -> str:
        """The address without /v1, below which APIs beside OpenAI's lie."""
        return self.url.removesuffix("/v1")

    @property
    def authorization(self) -> dict[str, str]:
        """The header with the key, if there is one."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def close(self) -> None:
        self.http.close()

    def find_model(self) -> str:
        """The first model that the server lists, unless one was named."""
        if not self.model:
            response = self.http.get(f"{self.url}/models")
            listed = json_of(response).get("data") if response.status_code == 200 else None
            if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
                raise Violation(f"GET /models answers {response.status_code} and lists no model")
            self.model = str(listed[0].get("id"))
        return self.model

    def post(self, path: str, body: Mapping[str, object]) -> httpx.Response:
        """The response to a body, to which the model's name is added."""
        return self.http.post(f"{self.url}{path}", json={"model": self.model, **body})

    def refused(self, path: str, body: Mapping[str, object]) -> JsonObject:
        """The error that a request is answered with, which must be a 4xx with a message."""
        response = self.post(path, body)
        if not 400 <= response.status_code < 500:
            raise Violation(f"status {response.status_code}, where 4xx is due")
        error = json_of(response).get("error", json_of(response))
        message = error.get("message") if isinstance(error, dict) else error
        if not message:
            raise Violation(f"status {response.status_code} without a message")
        return {"status": response.status_code, "message": message}

    def complete(self, path: str, body: Mapping[str, object]) -> ConformAnswer:
        """A complete answer. Raises Missing for a field that the server refuses, and Violation."""
        content = json_of(self._accepted(self.post(path, body)))
        return ConformAnswer(
            {_index(choice): _complete_choice(choice) for choice in _choices(content)}, content.get("usage")
        )

    def stream(self, path: str, body: Mapping[str, object]) -> ConformAnswer:
        """An answer put together from its events. Raises as `complete`."""
        answer = ConformAnswer({}, None)
        ended = False
        with self.events(path, body) as events:
            for event in events:
                if ended:
                    raise Violation("something follows [DONE]")
                if event == "[DONE]":
                    ended = True
                    continue
                _add(answer, _parsed(event))
        if not ended:
            raise Violation("the stream ends without [DONE]")
        return answer

    def response(self, body: Mapping[str, object]) -> JsonObject:
        """A complete answer of the Responses API. Raises as `complete`."""
        return json_of(self._accepted(self.post(RESPONSES, body)))

    def streamed_response(self, body: Mapping[str, object]) -> str:
        """The text that the events of a response tell, which must be numbered, and agree with its end."""
        text, final = "", None
        with self.events(RESPONSES, body) as events:
            for number, event in enumerate(map(_parsed, events)):
                kind = event.get("type")
                if event.get("sequence_number") != number:
                    raise Violation(f"event {number} ({kind}) has the number {event.get('sequence_number')}")
                text += event.get("delta", "") if kind == "response.output_text.delta" else ""
                if kind in ("response.completed", "response.incomplete"):
                    final = response_text(event.get("response") or {})
        if final != text:
            raise Violation(f"the deltas of a stream are {text!r}, its last event has {final!r}")
        return text

    @contextmanager
    def events(self, path: str, body: Mapping[str, object]) -> Iterator[Iterator[str]]:
        """The data of each event of a stream; leaving early closes the connection."""
        content = {"model": self.model, **body, "stream": True}
        with self.http.stream("POST", f"{self.url}{path}", json=content) as response:
            if response.status_code != 200:
                response.read()
            self._accepted(response)
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise Violation(f"a stream is of type {kind!r}, not text/event-stream")
            yield _data_of(response.iter_bytes())

    def _accepted(self, response: httpx.Response) -> httpx.Response:
        if response.status_code in (400, 404, 422, 501):
            raise Missing(f"status {response.status_code}: {response.text[:200]}")
        if response.status_code != 200:
            raise Violation(f"status {response.status_code}: {response.text[:200]}")
        return response


def output_of(response: JsonObject) -> list[JsonObject]:
    """The items of a response. Raises Violation."""
    output = response.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise Violation("a response has no list of items as its output")
    return output


def response_text(response: JsonObject) -> str:
    """The text of the messages of a response. Raises Violation."""
    messages = [item.get("content") or [] for item in output_of(response) if item.get("type") == "message"]
    return "".join(part.get("text") or "" for content in messages for part in content if isinstance(part, dict))


def json_of(response: httpx.Response) -> JsonObject:
    """The object of a response. Raises Violation."""
    return _parsed(response.text)


def _parsed(text: str) -> JsonObject:
    try:
        content = json.loads(text)
    except ValueError:
        raise Violation(f"this is no JSON: {text[:100]!r}") from None
    if not isinstance(content, dict):
        raise Violation(f"this is no JSON object: {text[:100]!r}")
    return content


def _data_of(pieces: Iterator[bytes]) -> Iterator[str]:
    """The data of server-sent events. An event whose bytes are no UTF-8 by themselves is a violation."""
    pending = b""
    for piece in pieces:
        pending += piece.replace(b"\r\n", b"\n")
        *events, pending = pending.split(b"\n\n")
        for event in events:
            try:
                lines = event.decode("utf-8").split("\n")
            except UnicodeDecodeError:
                raise Violation("an event of a stream is no UTF-8: a character was cut") from None
            data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
            if data:
                yield "\n".join(data)


def _choices(content: JsonObject) -> list[JsonObject]:
    choices = content.get("choices")
    if not isinstance(choices, list):
        raise Violation("an answer has no list of choices")
    return [choice for choice in choices if isinstance(choice, dict)]


def _index(choice: JsonObject) -> int:
    return int(choice.get("index") or 0)


def _complete_choice(choice: JsonObject) -> ConformChoice:
    message = choice.get("message") or {}
    text = message.get("content") if "message" in choice else choice.get("text")
    result = ConformChoice(text or "", choice.get("finish_reason"), tokens=_token_bytes(choice))
    for number, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function") or {}
        result.calls[number] = {"id": call.get("id"), **{key: function.get(key) for key in ("name", "arguments")}}
    return result


def _add(answer: ConformAnswer, event: JsonObject) -> None:
    """Add what an event tells. A server's error event is a violation."""
    if "error" in event:
        raise Violation(f"the stream breaks off: {event['error']}")
    answer.usage = event.get("usage") or answer.usage
    for fragment in _choices(event):
        choice = answer.choices.setdefault(_index(fragment), ConformChoice())
        delta = fragment.get("delta") or {}
        choice.text += (delta.get("content") if "delta" in fragment else fragment.get("text")) or ""
        choice.tokens += _token_bytes(fragment)
        for part in delta.get("tool_calls") or []:
            call = choice.calls.setdefault(int(part.get("index") or 0), {"id": None, "name": "", "arguments": ""})
            function = part.get("function") or {}
            call["id"] = call["id"] or part.get("id")
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""
        choice.finish_reason = fragment.get("finish_reason") or choice.finish_reason


def _token_bytes(choice: JsonObject) -> bytes:
    logprobs = choice.get("logprobs") or {}
    entries = logprobs.get("content") or []
    return b"".join(bytes(entry.get("bytes") or entry.get("token", "").encode()) for entry in entries)
