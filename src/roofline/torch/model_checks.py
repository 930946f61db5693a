"""Models that are more, or less, than a plain model of transformers: refused with what to hand over in their place."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.fields import shorten
from roofline.torch.linear import MERGE, PackedLinear, is_adapted

_COMPILED = "_orig_mod"  # the submodule that torch.compile puts a module into


def check_plain(model: object) -> None:
    """Raise ConfigError for a model in a wrapper, with an adapter or with packed layers. Hooks, and
    rotary frequencies that were rounded, are told in the log."""
    kind = type(model).__name__
    if isinstance(model, str | Path):
        raise ConfigError(f"from_model takes a model in memory, not {str(model)!r}: roofline.LLM takes names and paths")
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "to_dict"):
        inner = next((name for name in ("module", "model") if hasattr(getattr(model, name, None), "config")), None)
        remedy = f"hand over its .{inner}" if inner else "hand over a model such as LlamaForCausalLM"
        raise ConfigError(f"a {kind} is not a model of transformers with its configuration: {remedy}")
    if type(model).__module__.partition(".")[0] == "peft":
        raise ConfigError(
            f"a {kind} has an adapter beside its weights; merge it into them: model = model.merge_and_unload()"
        )
    hooked = rounded = ""
    for name, module in model.named_modules():
        where = f"{kind}: {shorten(name)!r}" if name else kind
        if _COMPILED in module._modules:
            remedy = f"hand over the module inside, its .{_COMPILED}"
            raise ConfigError(f"{where} is wrapped by torch.compile: {remedy}; or compile by module.compile()")
        if is_adapted(module):
            raise ConfigError(f"{where} has an adapter beside its weight, merged or not; {MERGE}")
        if isinstance(module, PackedLinear):
            remedy = "hand the model over before quantize_linears, or save it and use `roofline quantize`"
            raise ConfigError(f"{where} is a PackedLinear, whose weights are quantised for torch's kernels: {remedy}")
        if not hooked and any(
            map(_is_users_hook, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
        ):
            hooked = name or kind
        frequencies = module._buffers.get("inv_freq")
        if not rounded and frequencies is not None and frequencies.itemsize < 4:
            rounded = str(frequencies.dtype)
    if hooked:
        log.get("torch").warning("%s: hooks of modules (the first is %r) are not called here", kind, hooked)
    if rounded:
        text = "%s: its rotary frequencies were rounded to %s, as .to() does; here they are float32, as %s has them"
        log.get("torch").warning(text, kind, rounded, "from_pretrained(dtype=...)")


def _is_users_hook(hook: Callable[..., object]) -> bool:
    """Whether a hook is none of transformers' own, which keep hidden states and attentions for its outputs."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", "").partition(".")[0] != "transformers"
