"""roofline quantize: a model's weights in fewer bits, as a GGUF file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.models.progress import weights_bar
from roofline.cli.options import AsJson, ModelArgument, Threads
from roofline.cli.output import print_json
from roofline.common.errors import ConfigError
from roofline.common.options import Option
from roofline.common.units import human_bytes

if TYPE_CHECKING:
    from roofline.bundle.rewrite import Rewritten
    from roofline.weights.checkpoint import Checkpoint


def command(
    model: ModelArgument,
    to: Annotated[
        str, Option("q4 (Q4_K_M), q5, q6, q8, bf16, f16, f32, or a kind of file by llama.cpp's name, as gguf:Q5_K_S.")
    ],
    output: Annotated[Path, Option("A new file that ends in .gguf.", flags=("--output", "-o"))],
    requantize: Annotated[
        bool, Option("Round weights that were quantised before: they lose twice, once then and once now.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write MODEL's weights in fewer bits, each block with the scale that loses least."""
    from roofline.bundle.rewrite import Work, quantised_tensors, write_gguf
    from roofline.weights.quantise.mixes import mix_of

    mix = mix_of(to)
    if output.suffix != ".gguf":
        raise ConfigError(f"{output} does not end in .gguf: quantised weights are written as a GGUF file")
    checkpoint = opened(model, output)
    lost = quantised_tensors(checkpoint)
    if lost and not requantize:
        form = checkpoint.tensors[lost[0]].format
        raise ConfigError(
            f"{checkpoint.path} is quantised already (tensor {lost[0]!r} is {form}): start from its 16-bit weights, or "
            "say --requantize to round what is left of them once more"
        )
    with weights_bar("quantising") as bar:
        work = Work(progress=bar) if threads is None else Work(threads=threads, progress=bar)
        written = write_gguf(checkpoint, output, mix, work)
    note = f"{len(lost)} tensors had been quantised before and were rounded a second time"
    print_written(written, [note] if lost else [], as_json)


def opened(model: str, output: Path) -> "Checkpoint":
    """The checkpoint of a model, pulled first. Raises ConfigError where the output is the model itself."""
    from roofline.bundle.reader import is_bundle
    from roofline.cli.run.prepare import pull
    from roofline.common import env, extensions
    from roofline.weights import sources
    from roofline.weights.checkpoint import open_checkpoint

    env.quiet_numpy()
    if is_bundle(Path(model)):
        raise ConfigError(f"{model} is a bundle, whose weights are packed for one chip: name the model it was made from")
    extensions.load()
    pull(model)
    path = sources.resolve(model)
    if output.exists() and output.samefile(path):
        raise ConfigError(f"{output} is the model itself: name another place")
    return open_checkpoint(path)


def print_written(written: "Rewritten", notes: Sequence[str], as_json: bool) -> None:
    """What was written, and what is to be known of it."""
    if as_json:
        record = {"path": str(written.path), "bytes": written.nbytes, "bits_per_weight": round(written.bits, 4)}
        print_json(record | {"tensors": dict(written.tensors), "notes": list(notes)})
        return
    kinds = ", ".join(f"{count} {form}" for form, count in sorted(written.tensors.items()))
    print(f"{written.path}: {human_bytes(written.nbytes)}, {written.bits:.2f} bits a weight; tensors: {kinds}")
    for note in notes:
        print(note)
