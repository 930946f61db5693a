"""A Hugging Face model in memory as a Checkpoint, its own tensors under our names, and its tokenizer as ours: nothing
is written to disk."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roofline.bundle import with_template
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import shorten
from roofline.text.templates.template import ChatTemplate
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.torch.model_checks import check_plain
from roofline.torch.module_checks import check_modules
from roofline.weights import names
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.config.hf import from_hf
from roofline.weights.config.wrapped import TextTensors, wrapper_of
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import TensorInfo
from roofline.weights.hf_values import as_ours
from roofline.weights.quantised.method import TensorSource
from roofline.weights.stored_names import HEAD, stored_names

PretrainedModel = Any  # transformers' class of that name; transformers itself is not imported here
PretrainedTokenizer = Any

_FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def checkpoint_of(model: PretrainedModel) -> Checkpoint:
    """The Checkpoint of a causal language model of transformers, of a family that docs/models.md names, or of the
    language model in one that reads more than text.

    Tensors keep their dtype (float32, bfloat16, float16). On the CPU they are read where they are; on another device
    each is copied when it is read.

    Raises:
        UnsupportedError: an architecture, a dtype or a kind of tensor (sharded, quantised) that we do not read.
        ConfigError: tensors or modules and configuration do not fit each other; a model in a wrapper, with an adapter
            beside its weights or with packed layers.
    """
    check_plain(model)
    name = Path(name_of(model))
    settings = model.config.to_dict()
    config, wrapper = from_hf(name, settings), wrapper_of(settings)
    state: dict[str, Tensor] = model.state_dict()
    text = TextTensors(name, settings, wrapper, _State(state)) if wrapper is not None else None
    if text is not None:
        state = {plain: state[key] for plain, key in text.names.items()}
    for key, tensor in state.items():
        _check(name, key, tensor)
    if config["tied"]:
        _check_tied(name, config["family"], state)
    source: TensorSource = _State(state)
    apart = files_of(config["family"]).NAMES.hf_apart
    if apart is not None:
        source = apart(name, source)
    dtypes = {key: info.format for key, info in source.tensors.items()}
    stored = stored_names(name, dtypes, config, strict=True).parameters
    if config["tied"]:
        stored.pop(HEAD, None)
    elif HEAD not in stored and "head" in files_of(config["family"]).NAMES.top:
        cause = f"{name}: tensor 'head.weight' is missing: a {type(model).__name__} is a model below its head"
        raise ConfigError(f"{cause}; hand over the whole one, such as LlamaForCausalLM")
    tensors = {ours: replace(source.tensors[key], name=ours) for ours, key in stored.items()}
    infos, read = as_ours(config, tensors, lambda ours: source.read(stored[ours]))
    checkpoint = Checkpoint(
        path=name,
        kind="memory",
        tensors=infos,
        metadata={},
        config=config,
        bytes_of=read,
        other_parts=text.other_parts if text is not None else None,
    )
    checkpoint.check_names(names.parameter_shapes(config, infos))
    check_modules(name, model, wrapper.other_modules if wrapper is not None else ())
    return checkpoint


def with_copies(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same checkpoint on copies of its tensors, which stay as they are when the model is trained."""
    copies = {name: checkpoint.read(name).copy() for name in checkpoint.tensors}
    return replace(checkpoint, bytes_of=copies.__getitem__)


class _State:
    """Tensors of a model in memory. See `weights.quantised.method.TensorSource`."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.tensors = {
            key: TensorInfo(key, _dtype(tensor), tuple(tensor.shape), tensor.nbytes) for key, tensor in state.items()
        }

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes]."""
        return _bytes(self._state[name])


def name_of(model: PretrainedModel) -> str:
    """What a model in memory is called: the name it was loaded by, or its class."""
    return getattr(model.config, "_name_or_path", "") or type(model).__name__


def _dtype(tensor: Tensor) -> str:
    return _FORMATS.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _check(path: Path, key: str, tensor: Tensor) -> None:
    what = f"{path}: tensor {shorten(key)!r}"
    if type(tensor) is not Tensor:  # sharded, quantised by others: what its bytes mean is theirs to say
        reason = "only plain tensors are read"
        raise UnsupportedError(f"{what}: {type(tensor).__name__}", reason, ("a model gathered on one device",))
    if tensor.is_meta:
        raise ConfigError(f"{what} is on the meta device: it has a shape but no values; load the weights first")


def _check_tied(path: Path, family: str, state: Mapping[str, Tensor]) -> None:
    """A configuration that says tied while the tensors differ would lose the head."""
    ends = {names.from_hf(family, key): tensor for key, tensor in state.items()}
    head, embed = ends.get("head.weight"), ends.get("embed.weight")
    if head is None or embed is None or head.data_ptr() == embed.data_ptr():
        return
    if head.shape != embed.shape or not torch.equal(head, embed):
        raise ConfigError(
            f"{path}: tie_word_embeddings is set, but head and embedding differ; "
            "set config.tie_word_embeddings = False, or call tie_weights()"
        )


def _bytes(tensor: Tensor) -> np.ndarray:
    """uint8 [nbytes], a view where the tensor is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def text_of(tokenizer: PretrainedTokenizer, eos_ids: tuple[int, ...] = ()) -> tuple[Tokenizer, ChatTemplate]:
    """Our tokenizer and chat template of one of transformers'.

    Args:
        tokenizer: one over the `tokenizers` library ("fast").
        eos_ids: further ids that end an answer.

    Raises:
        UnsupportedError: a tokenizer in Python, or with a model that we do not have.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        what = f"the tokenizer {type(tokenizer).__name__}"
        raise UnsupportedError(what, "it has no tokenizer.json", ("AutoTokenizer.from_pretrained(..., use_fast=True)",))
    # Whether ids are put around a text is in the backend's own post-processor, as it is now.
    settings = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "eos_token_id": eos_ids}
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    return with_template(from_json(backend.to_str().encode(), settings), template)
