"""Builds the model of a configuration's model section: its initial parameters, its compilation."""

from functools import partial

import numpy as np
import torch

from roofline.common.errors import ConfigError
from roofline.common.names import did_you_mean
from roofline.ops import formats
from roofline.train.config.schema import TrainConfig
from roofline.train.model.init import fill, initialize, start_adapter
from roofline.train.model.modules import Model
from roofline.train.model.shapes import files
from roofline.train.model.tensor_parallel import part
from roofline.train.model.widen import PLAIN
from roofline.weights.checkpoint import Checkpoint, open_checkpoint
from roofline.weights.latent_form import latent_form

_ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]


def start(model: Model, config: TrainConfig) -> None:
    """Fill the parameters from a model's files, or as init_config says, and an adapter so that it changes nothing."""
    section = config.model
    if model.forms:
        freeze(model, latent_form(open_checkpoint(files(section)), latent=False))
        start_adapter(model, config.seed)
        return
    if section.loads_weights:
        load(model, latent_form(open_checkpoint(files(section)), latent=False))
        return
    name = "kaiming_normal_" if section.name == "mpt_causal_lm" else "baseline_"
    init = section.init_config
    initialize(model, config.seed, init if init.name else init.model_copy(update={"name": name}))


def wrap(model: Model, config: TrainConfig) -> None:
    """Activation checkpointing, then compilation around it, as configured."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    checkpointing = config.fsdp_config.activation_checkpointing if config.fsdp_config is not None else False
    if checkpointing:
        kept_ops = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, *_ATTENTION]
        selective = partial(create_selective_checkpoint_contexts, kept_ops)
        model.checkpoint_activations(selective if checkpointing == "selective" else None)
    if config.compile_config is not None:
        _check_backend(config.compile_config.backend)
        model.compile(config.compile_config.backend, config.compile_config.mode)


def _check_backend(name: str) -> None:
    """Raise ConfigError for a backend of torch.compile that torch would refuse at the first step."""
    from torch._dynamo.backends.registry import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        lookup_backend(name)
    except InvalidBackend as error:
        names = list_backends()
        raise ConfigError(
            f"compile_config.backend={name}: torch has {', '.join(names)}{did_you_mean(name, names)}"
        ) from error


def freeze(model: Model, checkpoint: Checkpoint) -> None:
    """Fill the frozen parameters from a file: with its bytes where they are kept in its format."""
    for param, form, tensor in model.frozen():
        if form.format in PLAIN:
            fill(tensor, torch.from_numpy(checkpoint.parameter(param)).to(PLAIN[form.format]))
            continue
        names = [param.name] if param.name in checkpoint.tensors else [param.expert(i) for i in range(param.experts)]
        if all(checkpoint.tensors[name].format == form.format for name in names):
            raw = np.concatenate([checkpoint.read(name) for name in names])
        else:
            raw = formats.get(form.format).quantize(checkpoint.parameter(param))
        fill(tensor, torch.from_numpy(raw).view(form.stored))


def load(model: Model, checkpoint: Checkpoint) -> None:
    """Copy the weights of a file into the parameters; quantised formats are widened."""
    for _, param, tensor in model.canonical():
        fill(tensor, part(param, model.ranks).cut(torch.from_numpy(checkpoint.parameter(param))))
