"""roofline finetune: a model learns from a file of samples, and is served with what it learnt."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson
from roofline.cli.parser import Argument, Named
from roofline.cli.training.train import Processes
from roofline.common.options import Option
from roofline.train.finetune.options import FinetuneOptions

if TYPE_CHECKING:
    from roofline.train.finetune.prepare import Data, Prepared

PROGRESS = 5.0  # seconds
FEW_STEPS = 10
UNTEMPLATED = ("completion", "icl", "text")  # forms of data
Changes = Annotated[list[str] | None, Option("KEY.KEY=VALUE of the run's configuration.", flags=("--set",))]


def command(
    options: FinetuneOptions,
    named: Annotated[frozenset[str], Named()],
    model: Annotated[str, Argument("The model: a name from `roofline list`, hf:ORG/REPO[:FILE], or a path.")],
    data: Annotated[Path, Argument("A file, a folder of files, or a saved Hugging Face data set.")],
    nproc: Processes = 1,
    changes: Changes = None,
    as_json: AsJson = False,
) -> int:
    """Fine-tune a model on samples: LoRA beside its frozen weights, or all of its parameters.

    The same command again goes on with a run that was stopped. What is printed at the end serves the result.
    """
    from roofline.cli.run.prepare import pull
    from roofline.cli.training.before_after import BeforeAfter, Served, run
    from roofline.train.finetune import plan
    from roofline.train.finetune.prepare import read_prompts

    options = options.with_preset(named)
    model = str(Path(model).resolve()) if Path(model).exists() else model
    folder = options.out or Path("runs", f"{Path(model).stem}-{data.stem}")
    pull(model)
    if options.show:
        _show(_data(model, data, options), model, options.show)
        return 0
    path = _prepare(model, _data(model, data, options), options, folder, changes or ())
    outcome = folder / ("model" if options.method == "full" else "adapter")
    served = Served(model, outcome, options.port, options.rank)
    around = BeforeAfter(served, read_prompts(folder / plan.DATA, options.ask), folder)
    return run(around, path, changes or (), nproc=nproc, as_json=as_json, serve=options.serve)


def _data(model: str, place: Path, options: FinetuneOptions) -> "Data":
    """What of a file or folder is prepared for a model."""
    from roofline.train.config.schema import ModelSection
    from roofline.train.finetune import plan
    from roofline.train.model.shapes import files
    from roofline.weights.checkpoint import read_config

    section = ModelSection(name="hf_causal_lm", pretrained_model_name_or_path=model)
    return plan.data_of(place, options, int(read_config(files(section))["max_position"]))


def _prepare(model: str, data: "Data", options: FinetuneOptions, folder: Path, changes: Sequence[str]) -> Path:
    """Prepare the data and write the run's configuration, whose path is returned. Says on stderr what was prepared."""
    from roofline.bundle import load_text_of
    from roofline.train.config.read import parse_config
    from roofline.train.finetune import plan
    from roofline.train.finetune.prepare import prepare

    words, template = load_text_of(model)
    precision, notes = plan.precision_of(options, plan.computes_on_cpu())
    # What is wrong with the options is said before minutes of preparation.
    stand_in = plan.configuration(model, options, plan.stand_in(data.length), folder, precision)
    parse_config(stand_in, "finetune", changes)
    afresh = not plan.has_begun(folder)
    prepared = prepare(data, folder / plan.DATA, words, template, progress=_Progress(), may_replace=afresh)
    path = plan.write(plan.configuration(model, options, prepared, folder, precision), folder)
    steps = plan.steps_of(options, prepared)
    lines = _summary(prepared, data, steps, options.batch)
    if data.length < options.max_seq_len:
        above = f"--max-seq-len {options.max_seq_len} is above the model's context"
        lines.append(f"{above}, {data.length:,} tokens, which is used")
    if template.is_default and prepared.form not in UNTEMPLATED:
        lines.append("the model has no chat template: chats are written in ChatML, as `roofline serve` writes them")
    if options.steps is None and steps < FEW_STEPS:
        lines.append("so few steps teach little: more samples, --epochs, a smaller --batch or --no-pack make more")
    for line in [*lines, *notes]:
        print(line, file=sys.stderr)
    return path


class _Progress:
    """Says every few seconds how many records are prepared."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, records: int) -> None:
        if time.monotonic() - self._last > PROGRESS:
            self._last = time.monotonic()
            print(f"{records:,} records prepared", file=sys.stderr)


def _summary(prepared: "Prepared", data: "Data", steps: int, batch: int) -> list[str]:
    """What was prepared, in words."""
    from roofline.train.finetune.forms import FORMS

    train, room = prepared.train, prepared.train.rows * prepared.length
    lines = [
        f"{data.name}: {prepared.records:,} records, read as {FORMS[prepared.form].about} (--format {prepared.form})",
        f"{train.samples:,} samples in {train.rows:,} rows of {'' if prepared.pack else 'at most '}{prepared.length:,} "
        f"tokens: {train.real:,} tokens, {train.trained:,} of them trained on"
        + (f", {1 - train.real / room:.1%} padding" if prepared.pack else "; not packed"),
    ]
    if prepared.held_out is not None:
        lines.append(f"{prepared.held_out.samples:,} samples are kept apart for evaluation")
    if prepared.cut:
        what = "left out" if data.drop else f"cut; the longest has {prepared.longest:,} tokens"
        lines.append(f"{prepared.cut:,} samples are longer than a row and were {what}: --max-seq-len raises the limit")
    if prepared.left_out - (prepared.cut if data.drop else 0) > 0:
        lines.append(f"{prepared.left_out:,} samples were left out: nothing to train on is within a row")
    if prepared.split:
        lines.append(
            f"{prepared.split:,} chats were taken apart, an answer each: the template writes earlier answers otherwise"
        )
    if prepared.ended:
        lines.append(f"{prepared.ended:,} samples got an end token, which the template does not write")
    lines.append(f"{steps:,} steps of {batch:,} rows, {steps * batch / train.rows:.2g} epochs")
    return lines


def _show(data: "Data", model: str, count: int) -> None:
    from itertools import islice

    from roofline.bundle import load_text_of
    from roofline.train.finetune.encode import Encoder
    from roofline.train.finetune.prepare import samples
    from roofline.train.finetune.show import marked

    words, template = load_text_of(model)
    encoder = Encoder(words, template, data.length, data.drop)
    colour = sys.stdout.isatty()
    for where, form, sample in islice(samples(data), count):
        parts = encoder.encode(sample, where)
        for part in parts:
            print(f"--- {where} ({form}): {len(part):,} tokens, {int(part.trained.sum()):,} trained on")
            print(marked(words, part, colour))
        if not parts:
            print(f"--- {where} ({form}): left out, nothing to train on is within {data.length:,} tokens")
