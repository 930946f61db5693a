"""roofline finetune: a model learns from a file of samples, and is served with what it learnt."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson
from roofline.cli.parser import Argument, NamedOptions
from roofline.cli.training.train import Processes
from roofline.common.options import Option
from roofline.train.finetune.options import FinetuneOptions

if TYPE_CHECKING:
    from roofline.common.json_types import JsonObject
    from roofline.train.finetune.encode import Encoder
    from roofline.train.finetune.prepare import Data, Prepared

Changes = Annotated[list[str] | None, Option("KEY.KEY=VALUE of the run's configuration.", flags=("--set",))]


def command(
    options: FinetuneOptions,
    named: Annotated[frozenset[str], NamedOptions()],
    model: Annotated[str, Argument("The model: a name from `roofline list`, hf:ORG/REPO[:FILE], or a path.")],
    data: Annotated[Path, Argument("A file, a folder of files, or a saved Hugging Face data set.")],
    nproc: Processes = 1,
    changes: Changes = None,
    as_json: AsJson = False,
) -> int:
    """Fine-tune a model on samples: LoRA beside its frozen weights, or all of its parameters.

    The same command again goes on with a run that was stopped. What is printed at the end serves the result.
    """
    from roofline.cli.training.told_data import Kind
    from roofline.cli.training.tuned_run import TunedRun, TuningTask
    from roofline.train.finetune import plan
    from roofline.train.finetune.forms import FORMS

    options = options.with_preset(named)

    def configure(model: str, prepared: "Prepared", folder: Path, precision: str) -> "JsonObject":
        return plan.configuration(model, options, prepared, folder, precision)

    forms = {name: f"{form.about} (--format {name})" for name, form in FORMS.items()}
    kind = Kind("sample", forms, misfit="nothing to train on is within a row")
    task = TuningTask(options, options.format, kind, configure, _shown)
    return TunedRun(model, data, task).train(nproc, changes or (), as_json)


def _shown(data: "Data", encoder: "Encoder", count: int, colour: bool) -> Iterator[str]:
    from collections import Counter
    from itertools import islice

    from roofline.cli.training.told_data import told_of_empty, told_of_unused
    from roofline.train.finetune.prepare import samples, unreasoned
    from roofline.train.finetune.show import marked

    unused = Counter[str]()
    for where, form, sample in islice(samples(data, unused), count):
        parts = encoder.encode(sample, where)
        for part in parts:
            yield f"--- {where} ({form}): {len(part):,} tokens, {int(part.trained.sum()):,} trained on"
            yield marked(encoder.tokenizer, part, colour)
        if not parts:
            yield f"--- {where} ({form}): left out, nothing to train on is within {data.length:,} tokens"
    if encoder.counts.empty:
        yield f"--- {told_of_empty(encoder.counts.empty)}"
    for line in told_of_unused(unused | unreasoned(encoder.counts), data.skipped):
        yield f"--- {line}"
