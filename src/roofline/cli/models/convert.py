"""roofline convert: a model between safetensors and GGUF, its weights as they are."""

from pathlib import Path
from typing import Annotated, Literal

from roofline.cli.options import AsJson, ModelArgument
from roofline.cli.progress import counted_bar
from roofline.common.errors import ConfigError
from roofline.common.options import Option


def command(
    model: ModelArgument,
    output: Annotated[
        Path,
        Option("A new file that ends in .gguf, or a new folder of safetensors.", flags=("--output", "-o")),
    ],
    dequantize: Annotated[
        bool, Option("Widen weights that are in fewer than 16 bits; what they lost before stays lost.")
    ] = False,
    dtype: Annotated[Literal["f32", "f16", "bf16"], Option("What --dequantize widens to; f32 is exact.")] = "f32",
    as_json: AsJson = False,
) -> None:
    """Write MODEL in the other format: safetensors as GGUF, GGUF as safetensors. Weights stay exact, in 16 and 32 bits
    and in what fewer both kinds of files have."""
    from roofline.bundle.rewrite import Work, quantised_tensors, without_place, write_gguf, write_safetensors
    from roofline.cli.models.quantize import opened, print_written

    checkpoint = opened(model, output)
    to_gguf = output.suffix == ".gguf"
    if to_gguf == (checkpoint.kind == "gguf"):
        kind = "a GGUF file" if to_gguf else "a folder of safetensors"
        raise ConfigError(f"{checkpoint.path} is {kind} already; `roofline quantize` changes the format of its weights")
    kind = "GGUF" if to_gguf else "safetensors"
    lost = without_place(checkpoint, kind)
    if lost and not dequantize:
        form = checkpoint.tensors[lost[0]].format
        what = f"{checkpoint.path} holds {len(lost)} quantised tensors, such as {lost[0]!r} in {form}"
        raise ConfigError(f"{what}, which {kind} cannot hold as they are: --dequantize widens them")
    if dequantize:
        lost = quantised_tensors(checkpoint)
    with counted_bar("converting") as bar:
        if to_gguf:
            written = write_gguf(checkpoint, output, dtype.upper() if lost else "", Work(progress=bar))
        else:
            written = write_safetensors(checkpoint, output, dtype.upper() if lost else "", Work(progress=bar))
    note = f"{len(lost)} tensors were widened to {dtype}: what they lost when they were quantised stays lost"
    print_written(written, [note] if lost else [], as_json)
