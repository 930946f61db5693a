"""roofline quantize: a model's weights in fewer bits, as a GGUF file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from roofline.cli.options import AsJson, ModelArgument, Threads
from roofline.cli.output import print_json
from roofline.cli.progress import counted_bar
from roofline.common.errors import ConfigError
from roofline.common.options import Option, Options, option
from roofline.common.units import human_bytes

if TYPE_CHECKING:
    from roofline.bench.quality.report import QualityReport
    from roofline.bundle.rewrite import Rewritten
    from roofline.weights.checkpoint import Checkpoint
    from roofline.weights.quantise.calibration import WeightCalibration


@dataclass(frozen=True)
class CalibrationTextOptions(Options):
    """The texts that rounding is fitted to and judged by."""

    calibrate: Path | None = option(
        None, "A text like those the model will read: errors count where its weights are used most."
    )
    method: Literal["importance", "awq", "gptq"] = option(
        "importance",
        "What --calibrate does: importance weighs errors by column; awq also scales the columns that count most; gptq "
        "makes up for errors in later columns.",
    )
    report: Path | None = option(
        None, "Another text, on which the result is compared with MODEL: perplexity, KL, tensors."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method != "importance" and self.calibrate is None:
            raise ConfigError(f"--method {self.method} measures the columns on a text: name one with --calibrate")


def command(
    model: ModelArgument,
    to: Annotated[
        str, Option("q4 (Q4_K_M), q5, q6, q8, bf16, f16, f32, or a kind of file by llama.cpp's name, as gguf:Q5_K_S.")
    ],
    output: Annotated[Path, Option("A new file that ends in .gguf.", flags=("--output", "-o"))],
    texts: CalibrationTextOptions,
    requantize: Annotated[
        bool, Option("Round weights that were quantised before: they lose twice, once then and once now.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write MODEL's weights in fewer bits, each block with the scale that loses least."""
    from roofline.bundle.rewrite import RewriteWork, quantised_tensors, write_gguf
    from roofline.cli.scores import read_text
    from roofline.models.mixes import mix_of

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
    calibrate, report = (None if path is None else read_text(path) for path in (texts.calibrate, texts.report))
    calibration = _calibration(checkpoint, calibrate, texts.method, mix, threads)
    with counted_bar("quantising") as bar:
        work = RewriteWork(progress=bar, calibration=calibration)
        written = write_gguf(checkpoint, output, mix, work if threads is None else replace(work, threads=threads))
    notes = [f"{len(lost)} tensors had been quantised before and were rounded a second time"] if lost else []
    compared = None
    if report is not None:
        compared = _compare(checkpoint, output, report, calibration, threads)
    print_written(written, notes, as_json, compared)


def _calibration(
    checkpoint: "Checkpoint", text: str | None, method: str, mix: str, threads: int | None
) -> "WeightCalibration":
    from roofline.weights.quantise.calibration import WeightCalibration

    if text is None:
        return WeightCalibration()
    from roofline.bench.quality.calibrate import calibrate
    from roofline.models.mixes import formats_of
    from roofline.weights.gguf_form import gguf_form
    from roofline.weights.quantise.scaling import fit_scales

    with counted_bar("calibrating") as bar:
        calibration = calibrate(checkpoint, text, method, threads, bar)
    if not calibration.foldings:
        if method == "awq":
            raise ConfigError(
                f"{checkpoint.path} has no columns that awq can scale: no norm, and no product of gate and up, is read "
                "by matrices alone; use --method importance"
            )
        return calibration
    kinds = formats_of(mix, {name: info.shape for name, info in gguf_form(checkpoint).tensors.items()})
    with counted_bar("scaling") as bar:
        return fit_scales(checkpoint, kinds, calibration, bar)


def _compare(
    checkpoint: "Checkpoint",
    output: Path,
    text: str,
    calibration: "WeightCalibration",
    threads: int | None,
) -> "QualityReport":
    from roofline.backends.options import LoadOptions
    from roofline.bench.quality.report import report
    from roofline.weights.checkpoint import open_checkpoint

    load = LoadOptions(threads=threads)
    with counted_bar("comparing") as bar:
        return report(checkpoint, open_checkpoint(output), text, load, calibration, progress=bar)


def opened(model: str, output: Path) -> "Checkpoint":
    """The checkpoint of a model, pulled first. Raises ConfigError where the output is the model itself."""
    from roofline.bundle.reader import is_bundle
    from roofline.cli.run.prepare import pull
    from roofline.common import env
    from roofline.weights import sources
    from roofline.weights.checkpoint import open_checkpoint

    env.quiet_numpy()
    if is_bundle(Path(model)):
        raise ConfigError(
            f"{model} is a bundle, whose weights are packed for one chip: name the model it was made from"
        )
    pull(model)
    path = sources.resolve(model)
    if output.exists() and output.samefile(path):
        raise ConfigError(f"{output} is the model itself: name another place")
    return open_checkpoint(path)


def print_written(
    written: "Rewritten", notes: Sequence[str], as_json: bool, compared: "QualityReport | None" = None
) -> None:
    """What was written, what is to be known of it, and how it compares with what it was made from."""
    notes = [*written.notes, *notes]
    if as_json:
        record = {"path": str(written.path), "bytes": written.nbytes, "bits_per_weight": round(written.bits, 4)}
        facts = {} if compared is None else {"report": compared.facts()}
        print_json(record | {"tensors": dict(written.tensors), "notes": notes} | facts)
        return
    kinds = ", ".join(f"{count} {form}" for form, count in sorted(written.tensors.items()))
    print(f"{written.path}: {human_bytes(written.nbytes)}, {written.bits:.2f} bits a weight; tensors: {kinds}")
    for note in notes:
        print(note)
    if compared is not None:
        from roofline.cli.scores import print_scores

        print_scores("model", ("source", "rounded"), (compared.source, compared.rounded))
        print("largest relative errors:", ", ".join(f"{e.name} ({e.format}) {e.error:.4f}" for e in compared.worst))
