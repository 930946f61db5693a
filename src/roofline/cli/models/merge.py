"""roofline merge: a LoRA adapter put into its model, with a certificate of what that changed."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson, ModelArgument, Threads
from roofline.cli.output import print_json
from roofline.cli.parser import Argument
from roofline.cli.progress import counted_bar
from roofline.common.files import write_atomically
from roofline.common.options import Option, Options, option
from roofline.common.units import human_bytes

if TYPE_CHECKING:
    from roofline.bench.quality.certificate import QualityCertificate
    from roofline.bundle.merge import MergedForm
    from roofline.bundle.rewrite import Rewritten
    from roofline.weights.adapter_merge import Merged
    from roofline.weights.adapters import Adapter

CERTIFICATE = "merge_certificate.json"  # in a folder; of a GGUF file NAME.certificate.json beside it


@dataclass(frozen=True)
class CertifyOptions(Options):
    """How the merged model is compared with the adapter."""

    probes: Path | None = option(
        None, "A text file with a prompt on each line, on which both are compared; default: eight of our own."
    )
    force: bool = option(
        False, "Write the model even where rounding takes away more than half of what the adapter changed."
    )


def command(
    model: ModelArgument,
    adapter: Annotated[str, Argument("A LoRA adapter: PEFT's folder, or a GGUF file of llama.cpp's.")],
    output: Annotated[
        Path, Option("A new file that ends in .gguf, or a new folder of safetensors.", flags=("--output", "-o"))
    ],
    certify: CertifyOptions,
    to: Annotated[
        str | None,
        Option("Format of the matrices, as for `roofline quantize`. Default: the formats that MODEL has."),
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write MODEL with ADAPTER in its weights, and a certificate: answers with the adapter beside those of the merged
    model, and what rounding left of each matrix."""
    from roofline.bundle.merge import merged_form
    from roofline.cli.models.quantize import opened
    from roofline.weights.adapter_merge import merged
    from roofline.weights.adapters import read_adapter
    from roofline.weights.files.output import check_new, staging_folder

    _prompts(certify.probes)  # before what takes longer: the file may not be there
    read, base = read_adapter(adapter), opened(model, output)
    form = merged_form(base, output, to)
    check_new(output, 0)
    place = output.with_suffix(".certificate.json") if form.gguf else output / CERTIFICATE
    if form.gguf:
        check_new(place, 0)
    merged_model = merged(base, read.matrices)
    with staging_folder(output) as folder:
        staged = folder / output.name
        written = _written(merged_model, staged, form, threads)
        certificate = _certified(merged_model, read, staged, output, certify, threads)
        text = json.dumps(certificate.facts(), indent=1) + "\n"
        if not form.gguf:
            write_atomically(staged / CERTIFICATE, text)
        staged.rename(output)
        if form.gguf:
            write_atomically(place, text)
    twice = form.twice_rounded(base)
    notes = [f"{len(twice)} tensors had been quantised before and were rounded a second time"] if twice else []
    _print(replace(written, path=output, notes=[*written.notes, *notes]), certificate, place, as_json)


def _prompts(path: Path | None) -> list[str]:
    from roofline.bench.quality.certificate import PROBES
    from roofline.cli.scores import read_text

    return [*PROBES] if path is None else [line for line in read_text(path).split("\n") if line.strip()]


def _written(model: "Merged", staged: Path, form: "MergedForm", threads: int | None) -> "Rewritten":
    from roofline.bundle.merge import write_merged
    from roofline.bundle.rewrite import RewriteWork

    with counted_bar("merging") as bar:
        work = RewriteWork(progress=bar)
        return write_merged(model, staged, form, work if threads is None else replace(work, threads=threads))


def _certified(
    model: "Merged", adapter: "Adapter", staged: Path, output: Path, certify: CertifyOptions, threads: int | None
) -> "QualityCertificate":
    """Certify the model at `staged`, which is to be called `output`."""
    from roofline.backends.options import LoadOptions
    from roofline.bench.quality.certificate import QualityCertificate, check_kept, compare
    from roofline.bench.quality.survival import head_is_tied, survivals
    from roofline.bundle.text_side import load_text
    from roofline.weights.checkpoint import open_checkpoint

    written = open_checkpoint(staged)
    with counted_bar("comparing") as bar:
        matrices = survivals(model, written, bar)
    if not certify.force:
        check_kept(matrices, output)
    tied = head_is_tied(model.base, written)
    tokenizer, _ = load_text(model.base)
    answers = compare(model, adapter, written, tokenizer, _prompts(certify.probes), LoadOptions(threads=threads))
    paths = str(model.base.path), str(adapter.path), adapter.digest, str(output)
    return QualityCertificate(*paths, tied, matrices, answers)


def _print(written: "Rewritten", certificate: "QualityCertificate", place: Path, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(written.path), "bytes": written.nbytes, "notes": written.notes} | certificate.facts())
        return
    kinds = ", ".join(f"{count} {form}" for form, count in sorted(written.tensors.items()))
    print(f"{written.path}: {human_bytes(written.nbytes)}, {written.bits:.2f} bits a weight; tensors: {kinds}")
    for line in (*written.notes, *certificate.lines(), f"certificate: {place}"):
        print(line)
