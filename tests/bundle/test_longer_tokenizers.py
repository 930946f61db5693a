"""A tokenizer with more ids than the embedding has rows: what counts is which ids occur in a request."""

import json
from pathlib import Path
from typing import Any

import pytest
from bundle_models import tokenizer_json
from library_binding import Library

from roofline import LLM, Constraint, SamplingParams
from roofline.bundle import compile_model, load
from roofline.common.errors import RequestError
from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.weights.files.gguf import GGUFFile
from tests.command_line import call_roofline

ROWS = 300


@pytest.fixture
def longer(model: Path) -> Path:
    """The model of 300 rows, a tokenizer with <image> as 300 and </end> as 301."""
    words = tokenizer_json()
    entry = words["added_tokens"][0]
    filler = [{**entry, "id": 258 + i, "content": f"<{i}>"} for i in range(42)]
    beyond = [{**entry, "id": ROWS + i, "content": text} for i, text in enumerate(("<image>", "</end>"))]
    words["added_tokens"] += [*filler, *beyond, {**entry, "id": ROWS + 2, "content": "ab\n", "special": False}]
    (model / "tokenizer.json").write_text(json.dumps(words))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "[PAD]"}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, ROWS + 1]}))
    return model


@pytest.fixture
def llm(longer: Path) -> Any:
    with LLM(str(longer)) as made:
        yield made


def refused(llm: LLM, prompt: Any, params: SamplingParams | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        llm.generate([prompt], params or SamplingParams(max_tokens=2))
    assert caught.value.status == 400
    return str(caught.value)


def test_it_answers_and_refuses_the_ids_that_have_no_row(llm: LLM) -> None:
    assert llm.tokenizer.vocab_size == ROWS + 4
    assert llm.tokenizer.eos_ids == (257,)
    answer = llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0]
    assert len(answer.ids) == 6
    for token in (ROWS, ROWS + 3):
        assert f"id {token} is not in the vocabulary of {ROWS}" in refused(llm, {"prompt_token_ids": [5, token]})
    biased = SamplingParams(max_tokens=2, logit_bias=((ROWS, 5.0),))
    assert f"id {ROWS} is not in the vocabulary of {ROWS}" in refused(llm, "hello", biased)
    assert f"id {ROWS + 2} is not in the vocabulary of {ROWS}" in refused(llm, "tab\n")  # of a token for any text
    assert llm.generate(["<image>"], SamplingParams(max_tokens=2))[0].ids  # typed, a special token is plain text


def test_answers_are_held_to_a_form(llm: LLM) -> None:
    pytest.importorskip("llguidance", reason="it holds answers to forms")
    held = SamplingParams(temperature=0, max_tokens=20, constraint=Constraint.of_choice(["ab\ncd<image>"]))
    assert llm.generate(["x"], held)[0].text == "ab\ncd<image>"


def test_bundles_and_the_c_library_read_it(library: Library, longer: Path, tmp_path: Path) -> None:
    settings = json.loads((longer / "tokenizer_config.json").read_text())
    (longer / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<image>"}))
    bundle = compile_model(str(longer), tmp_path / "bundle").path
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert (manifest["generation"]["bos_id"], manifest["generation"]["eos_ids"]) == (None, [257])
    stored = load(str(bundle), cache_tokens=256, max_model_len=128).tokenizer
    assert stored is not None
    assert (stored.vocab_size, stored.eos_ids) == (ROWS + 4, (257,))
    handle = library.open(bundle, threads=1, cache_tokens=64)
    assert library.decode(handle, [ord("h") - 33, 256]) == stored.decode([ord("h") - 33, 256]).encode()
    library.close(handle)


def test_gguf_files_are_written_without_the_tokens_that_have_no_row(longer: Path, tmp_path: Path) -> None:
    assert call_roofline(["convert", longer, "-o", tmp_path / "x.gguf"]).exit_code == 0
    metadata = GGUFFile(tmp_path / "x.gguf").metadata
    assert len(metadata["tokenizer.ggml.tokens"]) == ROWS
    assert from_gguf(metadata).eos_ids == (257,)
    with LLM(str(tmp_path / "x.gguf")) as made:
        assert made.generate(["hello"], SamplingParams(max_tokens=2))[0].ids
