"""Forms on the real model: answers have them, alone and in company, from Python."""

import json
import re
from pathlib import Path

import httpx
import jsonschema
import pytest

pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline import LLM, Constraint, SamplingParams

pytestmark = pytest.mark.e2e
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
BOMB = {"type": "string", "allOf": [{"pattern": f"(a|b)*{'ab'[i % 2]}(a|b){{{i + 5}}}"} for i in range(40)]}
FORMS = (
    Constraint.of_json_schema(SCHEMA),
    None,
    Constraint.of_regex(r"\d{4}-\d{2}-\d{2}"),
    Constraint.of_choice(["yes", "no", "perhaps"]),
    Constraint.of_lark('start: "<" /[a-z]{2,9}/ ">"'),
)
PROMPTS = ["A person as JSON:", "Rivers are", "Today is", "Is it so?", "A tag:"]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path):
    with LLM(str(smollm2_path), threads=1, cache_tokens=8192) as llm:
        yield llm


def params(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=i, max_tokens=24 if form is None else 200, constraint=form)
        for i, form in enumerate(FORMS)
    ]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_answers_have_their_form_and_are_the_same_in_company(llm: LLM, temperature: float) -> None:
    together = llm.generate(PROMPTS, params(temperature))
    person, _, date, choice, tag = [output.text for output in together]
    jsonschema.validate(json.loads(person), SCHEMA)
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    assert choice in ("yes", "no", "perhaps")
    assert re.fullmatch("<[a-z]{2,9}>", tag)
    assert [output.finish_reason for output in together if output.finish_reason != "stop"] == ["length"]
    for prompt, each, output in zip(PROMPTS, params(temperature), together, strict=True):
        assert llm.generate(prompt, each)[0].ids == output.ids


@pytest.mark.slow
def test_a_chat_answers_with_json_as_it_streams(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Describe a person of your choice."}]
    text = "".join(llm.stream(messages, SamplingParams(temperature=0, max_tokens=300, guided_json=SCHEMA)))
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text == llm.chat(messages, SamplingParams(temperature=0, max_tokens=300, guided_json=SCHEMA)).text


@pytest.mark.slow
def test_a_server_keeps_response_format_and_refuses_what_takes_too_long(served) -> None:
    body = {"model": served.model, "messages": [{"role": "user", "content": "A person, as JSON."}], "max_tokens": 300}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    url = f"{served.address}/v1/chat/completions"
    answer = httpx.post(url, json=body | {"temperature": 0, "response_format": form}, timeout=120)
    jsonschema.validate(json.loads(answer.json()["choices"][0]["message"]["content"]), SCHEMA)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    form["json_schema"]["schema"] = BOMB
    for stream in (False, True):
        error = httpx.post(url, json=body | {"response_format": form, "stream": stream}, timeout=120)
        assert (error.status_code, error.json()["error"]["param"]) == (400, "response_format")
        assert "it takes more than 2 s of a core" in error.json()["error"]["message"]
    choice = httpx.post(url, json=body | {"guided_choice": ["yes", "no"]}, timeout=120)
    assert choice.json()["choices"][0]["message"]["content"] in ("yes", "no")
