"""A model of transformers beside a fresh one of its configuration: modules that compute anything else are refused.

The weights of a model may be any, for they are read. What its modules do with them is not read but taken from the
configuration, so it has to be what transformers itself makes of that.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roofline.common.errors import ConfigError
from roofline.common.fields import shorten
from roofline.weights.config.wrapped import other_module

_PLAIN = (bool, int, float, str, type(None))
# Attributes that change nothing of what a model computes when it serves: of training, of names, of places, of sizes up
# to which something is computed ahead.
_NO_MATTER = frozenset(
    (
        *("training", "gradient_checkpointing", "layer_idx", "name_or_path", "loss_type", "kernel_config"),
        *("padding_idx", "scale_grad_by_freq", "sparse", "inplace", "p", "layerdrop"),
        "rope_deltas",  # of the pictures in the last prompt that transformers itself was given
    )
)
_NO_MATTER_PARTS = ("dropout", "jitter", "aux_loss", "max_seq_len", "original_max", "max_pos", "max_target")
_NOT_COMPUTED = ("__init__", "reset_parameters", "extra_repr")  # methods that a subclass may have of its own
_DRAWING = ("torch.nn.init", "transformers.initialization")  # modules of functions that fill a tensor
_TURNING_ANEW = ("dynamic", "longrope")  # rotary embeddings whose frequencies follow the length of the last prompt


def check_modules(path: Path, model: nn.Module, not_run: Collection[str] = ()) -> None:
    """Raise ConfigError where a module of a model is not as in a fresh model of the same class and configuration, but
    for those in modules that are not run here, by their names in the model.

    Compared are the methods of its class, a forward in its place, numbers, words and functions among its attributes,
    and tensors that are computed from the configuration. Weights of the fresh model are on the meta device: it costs
    some milliseconds a layer.
    """
    _check_attention(path, model)
    fresh = dict(_fresh(path, model).named_modules())
    for name, module in model.named_modules():
        if name not in fresh or other_module(name, not_run):
            continue  # without tensors, or refused as tensors that no matrix of ours has the names of
        if difference := next(_differences(module, fresh[name]), ""):
            where = f"{path}: {type(module).__name__} {shorten(name)!r}" if name else f"{path}: the model"
            plain = _made_by_transformers(model).__name__
            remedy = f"set the one as the other, or load the state_dict into a fresh {plain} of the right configuration"
            raise ConfigError(f"{where} {difference}; {remedy}")


def _check_attention(path: Path, model: nn.Module) -> None:
    """Raise ConfigError where attention is computed by a function that somebody registered with transformers."""
    functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    name = str(getattr(model.config, "_attn_implementation", ""))
    if name not in functions or "/" in name:  # computed by the modules, or by a kernel of transformers' hub
        return
    function = functions[name]
    if isinstance(function, FunctionType) and function.__module__.partition(".")[0] != "transformers":
        cause = f"{path}: attention is computed by {function.__module__}.{function.__qualname__}, which we do not know"
        raise ConfigError(f'{cause}; use one of transformers\' own: model.set_attn_implementation("sdpa")')


class _EmptyOnMeta(TorchFunctionMode):
    """Puts what torch.empty makes, which weights are before they are loaded, on the meta device, and draws no values
    for what lies there."""

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if getattr(function, "__module__", "") in _DRAWING:
            tensor = (kwargs or {}).get("tensor", args[0] if args else None)
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor  # torch finds out op by op that there is nothing to draw: most of what a model takes
        placed = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **{**(kwargs or {}), **placed})


def _made_by_transformers(model: nn.Module) -> type[nn.Module]:
    """The class of a model, or the one of transformers that it is derived from."""
    kinds: tuple[type[nn.Module], ...] = type(model).__mro__
    return next((kind for kind in kinds if kind.__module__.startswith("transformers.models.")), type(model))


def _fresh(path: Path, model: nn.Module) -> nn.Module:
    kind = _made_by_transformers(model)
    try:
        with torch.random.fork_rng(devices=[]), _EmptyOnMeta():
            return kind(copy.deepcopy(model.config))
    except Exception as error:  # whatever that class raises of a configuration
        cause = f"{path}: no {kind.__name__} can be made of the model's configuration"
        raise ConfigError(f"{cause}, so what its modules compute cannot be checked: {error}") from error


def _differences(module: nn.Module, fresh: nn.Module) -> Iterator[str]:
    """What a module has otherwise than the fresh one, as the end of a sentence."""
    if not _same_methods(type(module), type(fresh)):
        yield f"computes otherwise than the {type(fresh).__name__} that its configuration gives"
    if not _same_forward(module):
        yield "has a forward of its own in place of its class's"
    attributes = vars(module)
    for name, value in vars(fresh).items():
        if name.startswith("_") or name not in attributes or name in _NO_MATTER:
            continue
        if not any(part in name for part in _NO_MATTER_PARTS) and not _same_value(attributes[name], value):
            yield f"has {name} {_shown(attributes[name])}, and its configuration gives {_shown(value)}"
    for name, ours in fresh._buffers.items():
        if name not in fresh._non_persistent_buffers_set or name not in module._buffers:
            continue  # one that is stored is read as weights are
        theirs = module._buffers[name]
        turning = name.endswith("inv_freq") and "original" not in name
        if turning and any(kind in str(getattr(fresh, "rope_type", "")) for kind in _TURNING_ANEW):
            continue
        if theirs is not None and ours is not None and not ours.is_meta and not _same_numbers(theirs, ours):
            yield f"holds another {name} than its configuration gives"


def _same_methods(kind: type[nn.Module], fresh: type[nn.Module]) -> bool:
    """Whether a class is the fresh module's, or derived from it without another method that computes."""
    if kind is fresh:
        return True
    methods = (name for name, value in inspect.getmembers(fresh) if isinstance(value, FunctionType))
    return all(getattr(kind, name, None) is getattr(fresh, name) for name in methods if name not in _NOT_COMPUTED)


def _same_forward(module: nn.Module) -> bool:
    """Whether a module's forward is its class's, perhaps in what accelerate lays around it for devices and dtypes."""
    forward, expected = vars(module).get("forward"), type(module).forward
    if forward is None:
        return True
    hook = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    by_hooks = hook is not None and all(type(part).__module__ == "accelerate.hooks" for part in hooks)
    if by_hooks or "_original_forward" in vars(module):
        forward, expected = inspect.unwrap(forward), inspect.unwrap(expected)
    return getattr(forward, "__func__", forward) is expected


def _same_value(theirs: object, ours: object) -> bool:
    """Whether two attributes are the same, where they are of a kind that can be compared."""
    if isinstance(ours, FunctionType | BuiltinFunctionType):
        names = [(getattr(value, "__module__", ""), getattr(value, "__qualname__", "")) for value in (theirs, ours)]
        return names[0] == names[1]
    if isinstance(ours, _PLAIN) or (isinstance(ours, list | tuple) and all(isinstance(part, _PLAIN) for part in ours)):
        return bool(theirs == ours)
    return True


def _same_numbers(theirs: Tensor, ours: Tensor) -> bool:
    """Whether two tensors are the same, or the first was rounded when its model was cast."""
    if theirs.shape != ours.shape:
        return False
    values = theirs.detach().double().cpu()
    casts = (ours.to(dtype).double().cpu() for dtype in (ours.dtype, torch.bfloat16, torch.float16))
    return any(torch.allclose(values, cast, rtol=1e-5, atol=0) for cast in casts)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return shorten(getattr(value, "__qualname__", None) or repr(value))
