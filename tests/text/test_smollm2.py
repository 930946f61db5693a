"""SmolLM2's own tokenizer and chat template beside transformers', which takes seconds to read the GGUF file: all that
needs it is here, so one test process reads it."""

from typing import Any

import pytest
from text_samples import AWKWARD, MESSAGES, SPECIAL_TEXTS

from roofline.text.templates.template import ChatTemplate
from roofline.text.tokenizers.tokenizer import Tokenizer


@pytest.mark.parametrize("text", AWKWARD + SPECIAL_TEXTS)
def test_ids_are_those_of_transformers(smollm2: Tokenizer, smollm2_hf: Any, text: str) -> None:
    expected = smollm2_hf.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert smollm2.encode(text, add_special=False) == expected
    assert smollm2.encode(text, add_special=False, parse_special=True) == smollm2_hf.encode(
        text, add_special_tokens=False
    )
    assert smollm2.encode(text, add_special=True) == smollm2_hf.encode(text, split_special_tokens=True)
    assert smollm2.decode(expected, skip_special=False) == text


@pytest.mark.parametrize("text", AWKWARD)
def test_texts_are_those_of_transformers(smollm2: Tokenizer, smollm2_hf: Any, text: str) -> None:
    ids = smollm2.encode(f"<|im_start|>{text}<|im_end|>", add_special=False, parse_special=True)
    for skip in (False, True):
        assert smollm2.decode(ids, skip_special=skip) == smollm2_hf.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("chat", range(len(MESSAGES)))
def test_chats_are_those_of_transformers(
    smollm2: Tokenizer, smollm2_hf: Any, smollm2_metadata: dict[str, Any], chat: int
) -> None:
    source = smollm2_metadata["tokenizer.chat_template"]
    ours = ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>")
    for prompt in (True, False):
        expected = smollm2_hf.apply_chat_template(
            MESSAGES[chat], chat_template=source, tokenize=True, add_generation_prompt=prompt, return_dict=False
        )
        assert ours.encode_chat(smollm2, MESSAGES[chat], add_generation_prompt=prompt) == expected
