"""APIs beside OpenAI's with a real model, called by their own client packages."""

import json

import anthropic
import httpx
import ollama
import openai
import pytest
from e2e_serving import ASK
from huggingface_hub import InferenceClient, TextGenerationInputGrammarType

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_tokens_and_explanation(served):
    def post(path, **body):
        return httpx.post(served.address + path, json=body, timeout=60).json()

    rendered = post("/apply-template", messages=ASK)["prompt"]
    counted = post("/tokenize", model="small", messages=ASK, return_token_strs=True)
    assert post("/detokenize", tokens=counted["tokens"])["prompt"] == rendered
    assert counted["token_strs"][0] == "<|im_start|>"
    (prompt,) = post("/v1/explain", model="small", messages=ASK)["prompts"]
    assert [token["id"] for token in prompt["tokens"]] == counted["tokens"]
    spelt = "".join(token["text"] for token in prompt["tokens"] if token["source"] == "user")
    assert ASK[0]["content"] in spelt
    assert prompt["text"] == rendered


def test_responses(served):
    """In parts and at once a conversation has one prompt, and greedily one answer."""
    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0, timeout=120)
    fields = {"model": "small", "temperature": 0, "max_output_tokens": 16, "instructions": "Answer in one sentence."}
    first = client.responses.create(**fields, input=ASK)
    with client.responses.stream(**fields, input=ASK) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert told == first.output_text == client.responses.retrieve(first.id).output_text != ""
    question = {"role": "user", "content": "And then?"}
    chained = client.responses.create(**fields, input=[question], previous_response_id=first.id)
    whole = client.responses.create(**fields, input=[*ASK, *first.output, question], store=False)
    assert (chained.output_text, chained.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)


def test_anthropic(served):
    client = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0, timeout=120)
    fields = {"model": "small", "max_tokens": 24, "messages": ASK, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**fields, system="Answer in one sentence.")
    with client.messages.stream(**fields, system="Answer in one sentence.") as stream:
        assert "".join(stream.text_stream) == whole.content[0].text != ""
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model="small", messages=ASK).input_tokens
    plain = client.messages.create(**fields).usage
    assert plain.input_tokens + plain.cache_read_input_tokens == counted


@pytest.mark.slow
def test_anthropic_calls_tools(served):
    client = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0, timeout=120)
    schema = {"type": "object", "properties": {"place": {"enum": ["Paris", "Rome"]}}, "required": ["place"]}
    tool = {
        "name": "look",
        "description": "Looks somewhere.",
        "input_schema": {**schema, "additionalProperties": False},
    }
    fields = {
        **{"model": "small", "max_tokens": 60, "tools": [tool], "extra_body": {"temperature": 0}},
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    }
    whole = client.messages.create(**fields, messages=ASK)
    (block,) = whole.content
    assert (block.name, whole.stop_reason) == ("look", "tool_use")
    assert block.input["place"] in ("Paris", "Rome")
    with client.messages.stream(**fields, messages=ASK) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "It is sunny."}
    turns = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    del fields["tool_choice"]
    assert client.messages.create(**fields, messages=turns).content


def test_ollama(served):
    client = ollama.Client(host=served.address)
    options = {"temperature": 0, "num_predict": 24}
    whole = client.chat(model="small", messages=ASK, options=options)
    parts = list(client.chat(model="small:latest", messages=ASK, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content != ""
    assert (parts[-1].done_reason, parts[-1].eval_count) == (whole.done_reason, whole.eval_count)
    assert client.generate(model="small", prompt=ASK[0]["content"], options=options).response == whole.message.content
    shown = client.show("small")
    assert "<|im_start|>" in shown.template
    assert [model.model for model in client.list().models] == ["small"]

    def look(place: str) -> str:
        """Looks somewhere.

        Args:
            place: Where.
        """
        return place

    told = client.chat(model="small", messages=ASK, tools=[look], options=options)
    assert told.prompt_eval_count > whole.prompt_eval_count


def test_text_generation_inference_and_others_agree(served):
    text = "The capital of France is"
    client = InferenceClient(model=f"{served.address}/generate", timeout=60)
    whole = client.text_generation(text, max_new_tokens=12, details=True)
    *_, last = client.text_generation(text, max_new_tokens=12, details=True, stream=True)
    assert last.generated_text == whole.generated_text != ""
    told = "".join(token.text for token in whole.details.tokens if not token.special)
    assert told == whole.generated_text
    stop = whole.generated_text[4:8]
    assert client.text_generation(text, max_new_tokens=12, stop=[stop]).endswith(stop)

    def post(path, body):
        return httpx.post(served.address + path, json=body, timeout=60).json()

    triton = post("/v2/models/small/generate", {"text_input": text, "max_tokens": 12, "parameters": {"temperature": 0}})
    assert triton["text_output"] == whole.generated_text
    for body in (
        {"inputs": text, "parameters": {"max_new_tokens": 12}},
        {"prompt": text, "max_tokens": 12, "temperature": 0},
    ):
        answer = post("/invocations", body)
        assert answer.get("generated_text", answer.get("choices", [{}])[0].get("text")) == whole.generated_text
    assert served.get("/ping").status_code == served.get("/v2/health/ready").status_code == 200


def test_answers_have_the_form_that_is_wanted(served):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    client = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0, timeout=120)
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    answer = client.messages.create(model="small", max_tokens=40, messages=ASK, **form)
    assert json.loads(answer.content[0].text)["a"] in (1, 2)
    form["output_config"]["format"]["schema"] = {"type": "nothing"}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        client.messages.create(model="small", max_tokens=40, messages=ASK, **form)
    text = InferenceClient(model=f"{served.address}/generate", timeout=60)
    grammar = TextGenerationInputGrammarType(type="regex", value="[ab]{3}")
    assert set(text.text_generation("Hi", grammar=grammar, max_new_tokens=20)) <= {"a", "b"}
