"""roofline convert: a model between safetensors and GGUF, its weights as they are; an adapter between PEFT's files and
GGUF."""

from pathlib import Path
from typing import Annotated, Literal

from roofline.cli.options import MODEL_HELP, AsJson, ModelArgument
from roofline.cli.output import print_json
from roofline.cli.progress import counted_bar
from roofline.common.errors import ConfigError
from roofline.common.options import Option
from roofline.common.units import human_bytes


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
    base: Annotated[str | None, Option(f"Of a LoRA adapter: the model that it belongs to. {MODEL_HELP}")] = None,
    as_json: AsJson = False,
) -> None:
    """Write MODEL in the other format: safetensors as GGUF, GGUF as safetensors. Weights stay exact, in 16 and 32 bits
    and in what fewer both kinds of files have. MODEL may be a LoRA adapter, PEFT's folder or a GGUF file."""
    from roofline.bundle.rewrite import RewriteWork, quantised_tensors, without_place, write_gguf, write_safetensors
    from roofline.cli.models.quantize import opened, print_written
    from roofline.weights.adapters import is_adapter

    if is_adapter(Path(model)):
        if dequantize:
            raise ConfigError("--dequantize is for models: an adapter's matrices are written in f32 anyway")
        return _convert_adapter(Path(model), output, base, as_json)
    if base is not None:
        raise ConfigError(f"--base is for a LoRA adapter, and {model} is none")
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
            written = write_gguf(checkpoint, output, dtype.upper() if lost else "", RewriteWork(progress=bar))
        else:
            written = write_safetensors(checkpoint, output, dtype.upper() if lost else "", RewriteWork(progress=bar))
    note = f"{len(lost)} tensors were widened to {dtype}: what they lost when they were quantised stays lost"
    print_written(written, [note] if lost else [], as_json)


def _convert_adapter(path: Path, output: Path, base: str | None, as_json: bool) -> None:
    from roofline.cli.models.quantize import opened
    from roofline.weights.adapter_files import AdapterDescription, write_adapter
    from roofline.weights.adapter_gguf import write_gguf_adapter
    from roofline.weights.adapter_merge import merged
    from roofline.weights.adapters import read_adapter
    from roofline.weights.config.wrapped import IN_MEMORY

    to_gguf = output.suffix == ".gguf"
    if to_gguf == path.is_file():
        raise ConfigError(f"{path} is {'a GGUF file' if to_gguf else 'a folder'} already: nothing is to be converted")
    if base is None:
        raise ConfigError(f"{path} is a LoRA adapter: say with --base which model it belongs to, whose names it gets")
    adapter, model = read_adapter(path), opened(base, output)
    merged(model, adapter.matrices)  # raises where it is another model's
    if to_gguf:
        nbytes = write_gguf_adapter(output, model.config, adapter.matrices)
    else:
        within = IN_MEMORY if model.other_parts is not None else ""
        write_adapter(output, model.config, adapter.matrices, AdapterDescription(base=base, within=within))
        nbytes = sum(file.stat().st_size for file in output.iterdir())
    if as_json:
        print_json({"path": str(output), "bytes": nbytes, "matrices": len(adapter.matrices), "rank": adapter.rank})
        return
    what = f"an adapter of {len(adapter.matrices)} matrices, ranks up to {adapter.rank}"
    print(f"{output}: {human_bytes(nbytes)}, {what}")
