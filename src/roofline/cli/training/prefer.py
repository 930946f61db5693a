"""roofline prefer and roofline reinforce: a model learns which answers are better, or to earn rewards for its own."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson
from roofline.cli.output import print_json
from roofline.cli.parser import Argument
from roofline.cli.training.finetune import Changes, train_file
from roofline.cli.training.train import Processes
from roofline.common.options import Option
from roofline.train.preference.options import PreferOptions, ReinforceOptions

if TYPE_CHECKING:
    from roofline.train.finetune.prepare import Prepared, Write
    from roofline.train.preference.prepare import Items

Model = Annotated[str, Argument("The model: a name from `roofline list`, hf:ORG/REPO[:FILE], or a path.")]
Out = Annotated[Path | None, Option("The run's folder. Default: runs/MODEL-DATA.", flags=("--out", "-o"))]


def prefer(
    options: PreferOptions,
    model: Model,
    data: Annotated[Path, Argument("Records with a prompt, a chosen and a rejected answer.")],
    out: Out = None,
    nproc: Processes = 1,
    changes: Changes = None,
    as_json: AsJson = False,
) -> int:
    """Train a model to prefer the better of two answers (DPO).

    The same command again goes on with a run that was stopped. What is printed at the end serves the result.
    """
    from roofline.train.preference.prepare import PAIRS, pair_items, write_pairs

    def summary(prepared: "Prepared") -> str:
        return f"{prepared.train.samples:,} pairs in {prepared.train.rows:,} rows of {prepared.length:,} tokens"

    run = _Run(model, data, out, f"{PAIRS} {options.format or ''}", write_pairs, pair_items)
    return run.train(options, summary, nproc, list(changes or ()), as_json)


def reinforce(
    options: ReinforceOptions,
    model: Model,
    prompts: Annotated[Path, Argument("Records with a prompt, and what the reward needs of each.")],
    out: Out = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> int:
    """Train a model by rewards for answers that it samples itself (GRPO).

    The answers, with their rewards, are in rollouts.jsonl in the run's folder.
    """
    from roofline.train.preference.options import check_room
    from roofline.train.preference.prepare import PROMPTS, prompt_items, write_prompts
    from roofline.train.preference.rewards import reward_of

    check_room(options)
    reward_of(options.reward)  # before anything is loaded

    def summary(prepared: "Prepared") -> str:
        return f"{prepared.train.samples:,} prompts, {options.group} answers to each of {options.batch} in a step"

    kind = f"{PROMPTS}-{options.max_new_tokens} {options.format or ''}"
    run = _Run(model, prompts, out, kind, write_prompts, prompt_items)
    return run.train(options, summary, 1, list(changes or ()), as_json)


class _Run:
    """The run of a command. kind: of the data; write: writes its shards; items: of a record, to be shown."""

    def __init__(self, model: str, data: Path, out: Path | None, kind: str, write: "Write", items: "Items") -> None:
        self.model = str(Path(model).resolve()) if Path(model).exists() else model
        self.data, self.kind, self.write, self.items = data, kind, write, items
        self.folder = out or Path("runs", f"{Path(self.model).stem}-{data.stem}")

    def train(
        self,
        options: PreferOptions | ReinforceOptions,
        summary: "Summary",
        nproc: int,
        changes: list[str],
        as_json: bool,
    ) -> int:
        """Prepare, train, and say how to serve the result; the exit status."""
        from roofline.train.finetune import plan
        from roofline.train.preference.options import configuration

        prepared = self._prepared(options)
        if prepared is None:
            return 0
        pack = isinstance(options, PreferOptions) and options.pack
        precision, notes = plan.precision_of(options.as_finetune(options.batch, pack), plan.computes_on_cpu())
        settings = configuration(self.model, options, prepared, self.folder, precision)
        path = plan.write(settings, self.folder)
        if prepared.left_out:
            notes.append(
                f"{prepared.left_out:,} of {prepared.records:,} records do not fit: --max-seq-len raises the limit"
            )
        for line in (f"{self.data}: {summary(prepared)}; {settings['max_duration'][:-2]} steps", *notes):
            print(line, file=sys.stderr)
        status, result = train_file(path, changes, nproc, as_json)
        if status:
            return status
        is_full = options.method == "full"
        outcome = self.folder / ("model" if is_full else "adapter")
        serving = [str(outcome)] if is_full else [self.model, "--adapter", f"{self.folder.name}={outcome}"]
        serve = shlex.join(["roofline", "serve", *serving])
        if as_json:
            print_json(result | {"folder": str(self.folder), "outcome": str(outcome), "serve": serve})
        else:
            print(f"serve it: {serve}")
        return 0

    def _prepared(self, options: PreferOptions | ReinforceOptions) -> "Prepared | None":
        """What is trained on; None where it was only to be shown."""
        from roofline.bundle import load_text_of
        from roofline.train.config.schema import ModelSection
        from roofline.train.finetune import plan
        from roofline.train.finetune.encode import Encoder
        from roofline.train.finetune.prepare import prepare
        from roofline.train.model.shapes import files
        from roofline.train.preference.prepare import shown
        from roofline.weights.checkpoint import read_config

        words, template = load_text_of(self.model)
        section = ModelSection(name="hf_causal_lm", pretrained_model_name_or_path=self.model)
        pack = isinstance(options, PreferOptions) and options.pack
        longest = int(read_config(files(section))["max_position"])
        chosen = plan.data_of(self.data, options.as_finetune(options.batch, pack), longest)
        chosen = replace(chosen, form=self.kind)
        if options.show:
            encoder = Encoder(words, template, chosen.length)
            for line in shown(chosen, encoder, self.items, options.show, sys.stdout.isatty()):
                print(line)
            return None
        return prepare(chosen, self.folder / plan.DATA, words, template, self.write)


if TYPE_CHECKING:
    from collections.abc import Callable

    Summary = Callable[[Prepared], str]
