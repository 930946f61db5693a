"""Models that read pictures or sound beside text, of which the text part alone is read.

Their config.json has that of the text model inside (`text_config`), and their files have its tensors under a name of
their own, beside those of a vision tower and what joins the two. A further model_type is a row of WRAPPERS.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from roofline.common.fields import Fields, describe, has_type, refuse, shorten
from roofline.common.json_files import read_config_json
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.parts_beside import PartsBeside
from roofline.weights.quantised.method import TensorSource
from roofline.weights.quantised.methods import KEYS as QUANTISATION

TEXT_CONFIG, _TIED = "text_config", "tie_word_embeddings"
# What files put before the names of the text model's tensors -> what it has itself there. Transformers 4.52 and later
# have `model.language_model.layers` in memory, and write so of models that began later; of older ones they write
# `language_model.model.layers` as before. A model without its head has no `model.` at the beginning.
SPELLINGS = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
)
IN_MEMORY = "model.language_model."  # what transformers has before the modules of each model's text part
# Keys beside the text part that name ids of prompts that stand for pictures and sound, or enclose them.
_MEDIA_KEY = re.compile(r"(image|video|audio|vision|[be]o[ia])(_\w+)?_token_(id|index)")


@dataclass(frozen=True)
class Wrapper:
    """What transformers (5.24) has for a model_type with a text part.

    other_modules: those that are no part of the text model, as the first words of names of tensors; text_type: the
    model_type of the text part, where that names none; any_text: whether it may name another; tied: the default of
    tie_word_embeddings, which stands outside the text part, whatever that says; None: as the text part says, unless
    the key outside says true; media: defaults of the keys with ids that stand for pictures and sound; spellings: what
    stands before names of the text part's tensors -> what the text model has there.
    """

    other_modules: tuple[str, ...]
    text_type: str
    any_text: bool
    tied: bool | None
    media: Mapping[str, int]
    spellings: Sequence[tuple[str, str]] = SPELLINGS


_TOWER = ("vision_tower", "multi_modal_projector")
_GEMMA4 = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
_GEMMA3N_MEDIA = {"image_token_id": 262_145, "audio_token_id": 262_273, "boi_token_id": 255_999}
_GEMMA3N_MEDIA |= {"eoi_token_id": 262_144, "boa_token_id": 256_000, "eoa_token_id": 262_272}
_GEMMA4_MEDIA = {"image_token_id": 258_880, "audio_token_id": 258_881, "video_token_id": 258_884}
_GEMMA4_MEDIA |= {"boi_token_id": 255_999, "eoi_token_id": 258_882, "boa_token_id": 256_000, "eoa_token_index": 258_883}
_QWEN_MEDIA = {"image_token_id": 151655, "video_token_id": 151656}
_QWEN_MEDIA |= {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
_QWEN35_MEDIA = {"image_token_id": 248056, "video_token_id": 248057}
_QWEN35_MEDIA |= {"vision_start_token_id": 248053, "vision_end_token_id": 248054}
_GLM_MEDIA = {"image_token_id": 151363, "video_token_id": 151364, "image_start_token_id": 151339}
_GLM_MEDIA |= {"image_end_token_id": 151340, "video_start_token_id": 151341, "video_end_token_id": 151342}
_KIMI_MEDIA = {"image_token_id": 163605, "video_token_id": 163840}
_KIMI_MEDIA |= {"vision_start_token_id": 163602, "vision_end_token_id": 163604}
WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        _TOWER,
        "gemma3_text",
        any_text=False,
        tied=True,
        media={"image_token_index": 262_144, "boi_token_index": 255_999, "eoi_token_index": 256_000},
    ),
    "gemma3n": Wrapper(_GEMMA4, "gemma3n_text", any_text=False, tied=True, media=_GEMMA3N_MEDIA),
    "gemma4": Wrapper(_GEMMA4, "gemma4_text", any_text=False, tied=True, media=_GEMMA4_MEDIA),
    "gemma4_unified": Wrapper(
        (*_GEMMA4, "vision_embedder"), "gemma4_unified_text", any_text=False, tied=True, media=_GEMMA4_MEDIA
    ),
    "mistral3": Wrapper(_TOWER, "mistral", any_text=True, tied=True, media={"image_token_index": 10}),
    "kimi_k25": Wrapper(
        ("vision_tower", "mm_projector"),
        "deepseek_v3",
        any_text=True,
        tied=True,
        media=_KIMI_MEDIA,
        spellings=(("language_model.model.blocks.", "model.layers."), *SPELLINGS),  # as transformers saves it again
    ),
    "llava": Wrapper(_TOWER, "llama", any_text=True, tied=None, media={"image_token_index": 32000}),
    "qwen3_vl": Wrapper(("visual",), "qwen3_vl_text", any_text=False, tied=False, media=_QWEN_MEDIA),
    "qwen3_vl_moe": Wrapper(("visual",), "qwen3_vl_moe_text", any_text=False, tied=False, media=_QWEN_MEDIA),
    "glm4v_moe": Wrapper(("visual",), "glm4v_moe_text", any_text=False, tied=None, media=_GLM_MEDIA),
    "qwen3_5": Wrapper(("visual",), "qwen3_5_text", any_text=False, tied=False, media=_QWEN35_MEDIA),
    "qwen3_5_moe": Wrapper(("visual",), "qwen3_5_moe_text", any_text=False, tied=False, media=_QWEN35_MEDIA),
}


# Modules that adapters may name and that no model of ours runs by itself, layers that guess further tokens among them.
_OTHER_MODULES = frozenset({"mtp", *(module for wrapper in WRAPPERS.values() for module in wrapper.other_modules)})


def wrapper_of(config: JsonObject) -> Wrapper | None:
    """The row of a parsed config.json; None for a model that is not in the table."""
    kind = config.get("model_type")
    return WRAPPERS.get(kind) if isinstance(kind, str) else None


def text_fields(path: Path, config: JsonObject) -> Fields:
    """The fields of a config.json, of a model that wraps a text model those of the text part.

    Taken from outside are the method by which weights are quantised, which is of all parts, and whether the embedding
    is the head, as transformers does; ids that end an answer are the tokenizer's business.

    Raises ConfigError where there is no text part.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        return Fields(path, config)
    outer = Fields(path, config)
    text = outer.inside(TEXT_CONFIG)
    if not text.values:
        outer.refuse(TEXT_CONFIG, "is missing, and says what the text part of this model is")
    methods = {key: config[key] for key in QUANTISATION if config.get(key) is not None}
    changes: dict[str, object] = {key: _of_text(method, wrapper) for key, method in methods.items()}
    tied = outer.get(_TIED, bool, wrapper.tied if _TIED not in config else False)
    if wrapper.tied is not None or tied:
        changes[_TIED] = tied
    if not wrapper.any_text or text.get("model_type", str) is None:
        changes["model_type"] = wrapper.text_type
    return text.changed(changes)


def _of_text(method: object, wrapper: Wrapper) -> object:
    """The settings of a quantisation method with modules under the text model's names."""
    if not isinstance(method, Mapping):
        return method
    lists = {
        key: method[key] for key in ("modules_to_not_convert", "ignored_layers") if has_type(method.get(key), list)
    }
    return {
        **method,
        **{key: [text_name(str(name), wrapper.spellings) for name in names] for key, names in lists.items()},
    }


def modules_within(folder: Path) -> str:
    """What transformers has before the modules of the text part of a folder's model; "" of a text model, and where
    there is no config.json."""
    file = folder / "config.json"
    return IN_MEMORY if file.is_file() and wrapper_of(read_config_json(file)) is not None else ""


def media_ids(path: Path, config: JsonObject) -> dict[int, str]:
    """Ids of prompts that stand for pictures and sound, or enclose them -> their keys; none of a text model."""
    wrapper = wrapper_of(config)
    if wrapper is None:
        return {}
    fields = Fields(path, {**wrapper.media, **config})
    keys = [key for key in fields.values if _MEDIA_KEY.fullmatch(key)]
    ids = {key: fields.get(key, int) for key in keys}
    for key, number in ids.items():
        if number is not None and not 0 <= number < 1 << 31:
            fields.refuse(key, f"{describe(number)} is not the id of a token")
    return {number: key for key, number in ids.items() if number is not None}


class TextTensors:
    """The tensors of the text part of a model under the text model's names. See `TensorSource`.

    Attributes:
        names: the text model's -> those of the source.
        other_parts: what the source has besides.

    Raises ConfigError where two tensors have the same name then.
    """

    def __init__(self, path: Path, config: JsonObject, wrapper: Wrapper, source: TensorSource) -> None:
        """path: of the files, which errors name; config: the whole config.json."""
        self._source, self.names = source, dict[str, str]()
        unused: list[TensorInfo] = []
        modules: dict[str, None] = {}
        for name, info in source.tensors.items():
            module = other_module(name, wrapper.other_modules)
            if module:
                unused.append(info)
                modules[module] = None
                continue
            plain = text_name(name, wrapper.spellings)
            if plain in self.names:
                twin = shorten(self.names[plain])
                refuse(path, f"tensor {shorten(name)!r}", f"is the tensor of the text part that {twin!r} is too")
            self.names[plain] = name
        self.tensors = {name: replace(source.tensors[old], name=name) for name, old in self.names.items()}
        size = sum(info.nbytes for info in unused)
        kind, media = str(config["model_type"]), media_ids(path, config)
        self.other_parts = PartsBeside(kind, tuple(modules), len(unused), size, media)

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes]."""
        return self._source.read(self.names[name])


def other_module(name: str, modules: Collection[str] = _OTHER_MODULES) -> str:
    """The module beside the text part, one of `modules`, that has a tensor or a module of this name; "" for others."""
    first = name.removeprefix("model.").partition(".")[0]
    return first if first in modules else ""


def text_name(name: str, spellings: Sequence[tuple[str, str]] = SPELLINGS) -> str:
    """What the text model itself calls a tensor or a module of its own in a model around it."""
    for spelling, plain in spellings:
        if f"{name}.".startswith(spelling):
            return (plain + f"{name}.".removeprefix(spelling)).removesuffix(".")
    return name
