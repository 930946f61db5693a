"""Bodies for every generating and reading route of a server: each field with each class of values, then at random."""

import random
from collections.abc import Iterator
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel

from roofline.server.routes import tokens
from roofline.server.routes.anthropic.schema import MessagesBody
from roofline.server.routes.ollama.schema import ChatRequest, GenerateRequest
from roofline.server.routes.openai.schema import ChatBody, CompletionBody
from roofline.server.routes.responses.schema import ResponseBody
from roofline.server.routes.tgi import schema as tgi
from roofline.server.routes.triton import schema as triton

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
MOST = 3  # tokens of an answer, unless the field that says so is the one that is changed
# Path, kind of its body, a body that is answered.
ROUTES: list[tuple[str, type[BaseModel], dict]] = [
    ("/v1/chat/completions", ChatBody, {"model": "small", "messages": [USER], "max_tokens": MOST}),
    ("/v1/completions", CompletionBody, {"model": "small", "prompt": "Hi", "max_tokens": MOST}),
    ("/v1/responses", ResponseBody, {"model": "small", "input": "Hi", "max_output_tokens": MOST}),
    ("/v1/messages", MessagesBody, {"model": "small", "messages": [USER], "max_tokens": MOST}),
    ("/api/chat", ChatRequest, {"model": "small", "messages": [USER], "options": {"num_predict": MOST}}),
    ("/api/generate", GenerateRequest, {"model": "small", "prompt": "Hi", "options": {"num_predict": MOST}}),
    ("/generate", tgi.GenerateBody, {"inputs": "Hi", "parameters": {"max_new_tokens": MOST}}),
    ("/generate_stream", tgi.GenerateBody, {"inputs": "Hi", "parameters": {"max_new_tokens": MOST}}),
    ("/v2/models/small/generate", triton.GenerateBody, {"text_input": "Hi", "max_tokens": MOST}),
    ("/invocations", CompletionBody, {"prompt": "Hi", "max_tokens": MOST}),
    ("/tokenize", tokens.TokenizeBody, {"prompt": "Hi"}),
    ("/detokenize", tokens.DetokenizeBody, {"tokens": [5, 6]}),
    ("/apply-template", tokens.TemplateBody, {"messages": [USER]}),
    ("/v1/explain", ChatBody, {"model": "small", "messages": [USER]}),
]
# What clients send in a field of each kind.
NUMBERS = [0, 1, 2, 5, 0.5, 1.5]
STRINGS = ["a", "auto", "none", "json", "user", "small", "<|im_start|>", "a+"]
LISTS = [[], [5], [1, 2], ["a"], ["a", "b"], [USER], [USER, {"role": "assistant", "content": "Well"}, USER], [TOOL]]
OBJECTS = [
    *({}, {"5": 1.0}, {"include_usage": True}, {"type": "text"}, {"type": "json_object"}, {"regex": "(a|b)+"}),
    {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    {"type": "object", "properties": {"a": {"type": "integer"}}},
    {"type": "function", "function": {"name": "look"}},
]
DEEP: dict = {}
for _ in range(20):
    DEEP = {"a": DEEP}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}
# A value of each class: of every kind, at the bounds of numbers, and what attackers try.
CLASSES = [
    *(None, True, 0, 1, -1, 1.5, 1e-38, -1e30, 1e308, 2**31, 2**64),
    *("", "a", "\0", "\u200f💥é", "<|im_start|>", "../../etc/passwd", "{{ 7 * 7 }}", "(a+)+$", "9" * 5000),
    *([], [0], [49152], [[1]], ["a"] * 2000, [{"role": "user", "content": [IMAGE]}]),
    *({}, {"a": 1}, DEEP, {"type": "object", "$ref": "http://127.0.0.1:1/"}, {"grammar": "start: start"}),
]


def requests(count: int, seed: int) -> Iterator[tuple[str, dict]]:
    """(path, body) of so many requests. In turns one field has a value of some class, until each has had all, and some
    fields have what clients send in them."""
    chance = random.Random(seed)
    classes = values_in_fields()
    chance.shuffle(classes)
    for number in range(count):
        if number % 2 and classes:
            path, body, field, value = classes.pop()
            yield path, changed(body, field, value)
        else:
            path, kind, body = chance.choice(ROUTES)
            several = list(fields_of(kind))
            for field, values in chance.sample(several, min(len(several), chance.choice((0, 1, 1, 2)))):
                body = changed(body, field, chance.choice(values_of(values)))
            yield path, body


def values_in_fields() -> list[tuple[str, dict, tuple[str, ...], object]]:
    """(path, body, field, value) of a value of each class in each field of each route."""
    fields = [(path, body, field) for path, kind, body in ROUTES for field, _ in fields_of(kind)]
    return [(*place, value) for place in fields for value in CLASSES]


def fields_of(body: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """The paths of a body's fields, those of objects inside too, with the kinds of their values."""
    for name, field in body.model_fields.items():
        here = (*path, field.alias or name)
        yield here, field.annotation
        for kind in _alternatives(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields_of(kind, here)


def values_of(kind: object) -> list[object]:
    """Values of a kind of field."""
    values: list[object] = []
    for each in _alternatives(kind):
        origin = get_origin(each) or each
        if origin is bool:
            values += [True, False]
        elif origin in (int, float):
            values += NUMBERS
        elif origin is str:
            values += STRINGS
        elif origin is list:
            values += LISTS
        elif each is type(None):
            values.append(None)
        else:
            values += [*OBJECTS, *STRINGS]
    return values


def _alternatives(kind: object) -> list[object]:
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    # `int | None` and `Optional[int]` have different origins.
    if get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        return [each for part in get_args(kind) for each in _alternatives(part)]
    return [kind]


def changed(body: dict, path: tuple[str, ...], value: object) -> dict:
    """The body with another value at a path."""
    name, *rest = path
    inner = body.get(name)
    return {**body, name: changed(inner if isinstance(inner, dict) else {}, tuple(rest), value) if rest else value}
