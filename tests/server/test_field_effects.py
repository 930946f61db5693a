"""Every field that is accepted changes what is computed or how it is told: none is taken and ignored."""

import json

import msgspec
import pytest

from roofline.common.errors import RequestError
from roofline.server.routes.openai.read import chat, completion
from roofline.server.routes.openai.schema import ChatBody, CompletionBody
from roofline.server.text_side import TextSide
from roofline.text.templates.template import CHATML, ChatTemplate
from tests.server.text_sides import chatml

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "find"}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
# Of each field: what else the body needs, and the value that makes a difference.
SHARED = {
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "n": ({}, 2),
    "seed": ({}, 7),
    "temperature": ({}, 0.5),
    "top_p": ({}, 0.5),
    "top_k": ({}, 5),
    "min_p": ({}, 0.1),
    "presence_penalty": ({}, 1.0),
    "frequency_penalty": ({}, 1.0),
    "repetition_penalty": ({}, 1.5),
    "prompt_logprobs": ({}, 2),
    "use_beam_search": ({"n": 2}, True),
    "length_penalty": ({"use_beam_search": True}, 2.0),
    "early_stopping": ({"use_beam_search": True}, "never"),
    "logit_bias": ({}, {"5": 3.0}),
    "max_tokens": ({}, 5),
    "min_tokens": ({}, 3),
    "stop": ({}, "a"),
    "stop_token_ids": ({}, [5]),
    "ignore_eos": ({}, True),
    "response_format": ({}, SCHEMA),
    "structured_outputs": ({}, {"regex": "a+"}),
    "guided_json": ({}, {"type": "object"}),
    "guided_regex": ({}, "a+"),
    "guided_choice": ({}, ["a", "b"]),
    "guided_grammar": ({}, 'start: "a"'),
    "include_stop_str_in_output": ({"stop": "a"}, True),
    "skip_special_tokens": ({}, False),
    "return_token_ids": ({}, True),
    "return_progress": ({"stream": True}, True),
    "receipt": ({}, True),
    "truncate_prompt_tokens": ({}, 1),
    "user": ({}, "me"),
    "safety_identifier": ({}, "me"),
    "priority": ({}, 1),
    "cache_salt": ({}, "mine"),
}
EFFECTS = {
    "chat": SHARED | {
        "messages": ({}, [{"role": "user", "content": "Ho"}]),
        "tools": ({}, [TOOL]),
        "tool_choice": ({"tools": [TOOL]}, "none"),
        "parallel_tool_calls": ({"tools": [TOOL, OTHER], "tool_choice": "required"}, False),
        "chat_template_kwargs": ({}, {"shout": True}),
        "reasoning_effort": ({}, "low"),
        "add_generation_prompt": ({}, False),  # refused, as it must be the opposite of continue_final_message
        "continue_final_message": ({"messages": [USER, {"role": "assistant", "content": "Well"}]}, True),
        "max_completion_tokens": ({}, 5),
        "logprobs": ({}, True),
        "top_logprobs": ({"logprobs": True}, 3),
    },
    "completion": SHARED | {
        "prompt": ({}, "Ho"),
        "add_special_tokens": ({}, False),
        "parse_special": ({"prompt": "<s>"}, True),
        "best_of": ({}, 2),
        "echo": ({}, True),
        "logprobs": ({}, 3),
    },
}  # fmt: skip
KINDS = {
    "chat": (chat, ChatBody, {"messages": [USER]}),
    "completion": (completion, CompletionBody, {"prompt": "Hi"}),
}


def outcome(read, body, context) -> object:
    """All of a request that reaches the engine, the answer or the log, a parser by its class; or how it is refused."""
    try:
        generation = read(json.dumps(body).encode(), context)
    except RequestError as error:
        return str(error)
    parser = generation.parser()
    fields = {name: value for name, value in vars(generation).items() if name != "parser"}
    return type(parser), fields


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_a_row_for_every_field(kind):
    _, body, _ = KINDS[kind]
    assert EFFECTS[kind].keys() == body.model_fields.keys() - {"model"}  # another model is a 404, tested there


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind in KINDS for field in EFFECTS[kind]])
def test_a_field_makes_a_difference(make_context, engine, kind, field):
    read, _, base = KINDS[kind]
    needs, value = EFFECTS[kind][field]
    template = ChatTemplate("{{ shout }}{{ reasoning_effort }}" + CHATML, bos_token="<s>", eos_token="<|im_end|>")
    context = make_context(text=TextSide(chatml().tokenizer, template))
    engine.description = msgspec.structs.replace(engine.description, exact=True)  # or there are no receipts
    plain = {"model": "tiny", **base, **needs}
    with_field = outcome(read, {**plain, field: value}, context)
    assert isinstance(with_field, str) == (field == "add_generation_prompt")
    assert outcome(read, plain, context) != with_field
