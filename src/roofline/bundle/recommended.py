"""The sampling that a model's files recommend: of people who tried what makes it speak well."""

import math
from typing import TYPE_CHECKING

from roofline.common import log
from roofline.common.fields import Fields, describe
from roofline.common.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from roofline.weights.checkpoint import Checkpoint

# Our name -> the key of generation_config.json, that of a GGUF file's metadata, the least and the largest value.
_KEYS = {
    "temperature": ("temperature", "general.sampling.temp", 0.0, math.inf),
    "top_k": ("top_k", "general.sampling.top_k", -1.0, 2.0**31 - 1),  # -1, as 0, keeps all: so do vLLM and llama.cpp
    "top_p": ("top_p", "general.sampling.top_p", 0.0, 1.0),
    "min_p": ("min_p", "general.sampling.min_p", 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", "general.sampling.penalty_repeat", math.ulp(0.0), math.inf),
}
FIELDS = frozenset(_KEYS)
# Keys of generation_config.json that change transformers' answers, with what changes nothing beside null and no list.
_UNUSED: dict[str, object] = {
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "stop_strings")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("typical_p", "num_beams", "guidance_scale"), 1),
    "penalty_alpha": 0,
}


def recommended_sampling(checkpoint: "Checkpoint") -> JsonObject:
    """Fields of SamplingParams by name, those that the files name; empty where none is.

    A file that says `do_sample: false`, or a `top_p` of 0, recommends the most likely token.

    Raises ConfigError, with file and key, for a value that a field cannot have.
    """
    gguf = checkpoint.kind == "gguf"
    values = Fields(checkpoint.path, checkpoint.metadata) if gguf else _generation_config(checkpoint)
    recommended: JsonObject = {}
    for name, (json_key, gguf_key, _, largest) in _KEYS.items():
        key = gguf_key if gguf else json_key
        value = values.get(key, float)
        if value is None:
            continue
        if not is_possible(name, value):
            values.refuse(key, f"is {describe(values.values[key])}, not {_range(name, largest)}")
        recommended[name] = max(0, int(value)) if name == "top_k" else value
    if (not gguf and values.get("do_sample", bool) is False) or recommended.get("top_p") == 0:
        penalty = {key: value for key, value in recommended.items() if key == "repetition_penalty"}
        return penalty | {"temperature": 0.0}
    return recommended


def warn_of_unused(checkpoint: "Checkpoint") -> None:
    """Log the keys of a folder's generation_config.json that change transformers' answers, and not ours."""
    if checkpoint.kind == "gguf":
        return
    config = _generation_config(checkpoint)
    named = [key for key, neutral in _UNUSED.items() if config.values.get(key) not in (None, neutral, [])]
    if named:
        log.get("bundle").warning(
            "%s: not used, though it changes transformers' answers: %s", config.path, ", ".join(named)
        )


def is_possible(name: str, value: float) -> bool:
    """Whether a field of SamplingParams can be recommended to have a value."""
    _, _, least, largest = _KEYS[name]
    return least <= value <= largest and (name != "top_k" or float(value).is_integer())


def _range(name: str, largest: float) -> str:
    if name == "top_k":
        return "a whole number from 0, which keeps all tokens"
    if name == "repetition_penalty":
        return "a number above 0"
    return "a number of at least 0" if largest == math.inf else f"a number from 0 to {largest:g}"


def _generation_config(checkpoint: "Checkpoint") -> Fields:
    from roofline.common.json_files import read_json_file

    path = checkpoint.path / "generation_config.json"
    return Fields(path, read_json_file(path) if path.is_file() else {})


def gguf_sampling(recommended: JsonMapping) -> JsonObject:
    """What `recommended_sampling` gave, by the keys of a GGUF file."""
    return {_KEYS[name][1]: value for name, value in recommended.items()}


def hf_sampling(recommended: JsonMapping) -> JsonObject:
    """What `recommended_sampling` gave, by the keys of generation_config.json."""
    if recommended.get("temperature") == 0:
        return {"do_sample": False, **{_KEYS[name][0]: value for name, value in recommended.items() if value}}
    return {_KEYS[name][0]: value for name, value in recommended.items()}
