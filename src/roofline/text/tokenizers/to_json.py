"""A tokenizer as the files that Hugging Face writes beside the weights: the inverse of `from_json`."""

import json

from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.sentencepiece import SPACE
from roofline.text.tokenizers.to_gguf import check_same
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import JsonObject


def to_json(tokenizer: Tokenizer, chat_template: str | None, sampling: JsonObject) -> dict[str, bytes]:
    """File name -> bytes of tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        chat_template: Jinja, None where the model has none.
        sampling: what generation_config.json recommends, by its keys.

    Raises UnsupportedError where the files would be read back as another tokenizer.
    """
    vocabulary = tokenizer.vocabulary
    pipeline = dict(vocabulary.pipeline)
    if not vocabulary.byte_level and pipeline.get("decoder") is None:
        pipeline["decoder"] = _sentencepiece_decoder(vocabulary.strip_space)
    built = vocabulary.assemble(vocabulary.build_model(), pipeline)
    data = json.loads(built.to_str())
    data["post_processor"] = _post_processor(tokenizer)
    settings = _settings(tokenizer)
    if chat_template is not None:
        settings["chat_template"] = chat_template
    generation: JsonObject = {**sampling}
    if vocabulary.eos_ids:
        generation = {"eos_token_id": list(vocabulary.eos_ids), **generation}
    files = {"tokenizer.json": data, "tokenizer_config.json": settings, "generation_config.json": generation}
    written = {name: json.dumps(content, ensure_ascii=False, indent=1).encode() for name, content in files.items()}
    check_same(tokenizer, from_json(written["tokenizer.json"], {**generation, **settings}), "tokenizer.json")
    return written


def _sentencepiece_decoder(strips: bool) -> JsonObject:
    steps: list[JsonObject] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if strips:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _post_processor(tokenizer: Tokenizer) -> JsonObject | None:
    """What puts the ids around a text."""
    vocabulary = tokenizer.vocabulary
    if not vocabulary.prefix and not vocabulary.suffix:
        return None
    names = {i: vocabulary.spelling(i) or str(i) for i in (*vocabulary.prefix, *vocabulary.suffix)}
    before, after = (
        [{"SpecialToken": {"id": names[i], "type_id": 0}} for i in ids]
        for ids in (vocabulary.prefix, vocabulary.suffix)
    )
    text: JsonObject = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*before, text, *after],
        "pair": [*before, text, *after, *before, {"Sequence": {"id": "B", "type_id": 1}}, *after],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()},
    }


def _settings(tokenizer: Tokenizer) -> dict[str, object]:
    vocabulary = tokenizer.vocabulary
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if vocabulary.bos_id is not None:
        settings["bos_token"] = vocabulary.spelling(vocabulary.bos_id)
        settings["add_bos_token"] = vocabulary.bos_id in vocabulary.prefix
    if vocabulary.eos_ids:
        settings["eos_token"] = vocabulary.spelling(vocabulary.eos_ids[0])
        settings["add_eos_token"] = vocabulary.eos_ids[0] in vocabulary.suffix
    return settings
