"""A model written anew with an adapter in it, as a GGUF file or a folder of safetensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roofline.bundle.rewrite import (
    RewriteWork,
    Rewritten,
    quantised_tensors,
    safetensors_formats,
    write_gguf,
    write_safetensors,
)
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models.mixes import formats_of, mix_of, stays_float
from roofline.ops import formats
from roofline.weights.adapter_merge import Merged
from roofline.weights.checkpoint import Checkpoint

_PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class MergedForm:
    """gguf: a GGUF file, else a folder of safetensors; kinds: canonical name -> format of each tensor; mix: the kind of
    GGUF file, "" where the formats are those that the model alone has."""

    gguf: bool
    kinds: Mapping[str, str]
    mix: str = ""

    def twice_rounded(self, base: Checkpoint) -> list[str]:
        """The tensors that had been quantised before and get another format of fewer than 16 bits."""
        lost = quantised_tensors(base)
        return [name for name in lost if self.kinds[name] not in (*_PLAIN, base.tensors[name].format)]


def merged_form(base: Checkpoint, out: Path, to: str | None) -> MergedForm:
    """What `--to` and the output's name mean for a model. to: as for `roofline quantize`; None: the formats it has.

    Raises ConfigError for what such a file or folder does not hold.
    """
    gguf, mix = out.suffix == ".gguf", "" if to is None else mix_of(to)
    if not gguf and to is not None and to.lower().startswith("gguf:"):
        raise ConfigError(f"--to {to} is a GGUF file, and {out} does not end in .gguf")
    if gguf:
        shapes = {name: info.shape for name, info in base.tensors.items()}
        if mix:
            return MergedForm(True, formats_of(mix, shapes), mix)
        if base.kind != "gguf":
            raise ConfigError(f"{base.path} is no GGUF file, whose formats could stay: say --to bf16, or another")
        return MergedForm(True, {name: info.format for name, info in base.tensors.items()})
    if mix and mix not in _PLAIN:
        raise ConfigError(f"--to {to} is written as a GGUF file, and {out} does not end in .gguf")
    lost = quantised_tensors(base)
    if lost and not mix:
        form = base.tensors[lost[0]].format
        what = f"{base.path} is quantised (tensor {lost[0]!r} is {form})"
        raise ConfigError(f"{what}, which a folder of safetensors does not hold: say --to bf16, or name a .gguf file")
    kinds = safetensors_formats(base, mix)
    if mix:
        matrices = (name for name, info in base.tensors.items() if len(info.shape) > 1 and not stays_float(name))
        kinds |= dict.fromkeys(matrices, mix)
    return MergedForm(False, kinds)


def write_merged(model: Merged, out: Path, form: MergedForm, work: RewriteWork) -> Rewritten:
    """Write the model. Raises as `rewrite.write_gguf`, and UnsupportedError for formats that are read alone."""
    for name in model.parts:
        if formats.get(form.kinds[name]).pack is None:
            what = f"writing {name} in {form.kinds[name]}, as {model.base.path} has it,"
            raise UnsupportedError(what, "its blocks are read here and not made", ("--to q4", "--to bf16"))
    if form.gguf:
        return write_gguf(model.checkpoint, out, form.mix, work, form.kinds)
    return write_safetensors(model.checkpoint, out, "", work, form.kinds)
