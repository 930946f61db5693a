"""roofline prefer and roofline reinforce: a model learns which answers are better, or to earn rewards for its own."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson
from roofline.cli.parser import Argument
from roofline.cli.training.finetune import Changes
from roofline.cli.training.train import Processes
from roofline.train.preference.options import PreferOptions, ReinforceOptions

if TYPE_CHECKING:
    from roofline.common.json_types import JsonObject
    from roofline.train.finetune.prepare import Prepared, Write
    from roofline.train.preference.prepare import Items

Model = Annotated[str, Argument("The model: a name from `roofline list`, hf:ORG/REPO[:FILE], or a path.")]


def prefer(
    options: PreferOptions,
    model: Model,
    data: Annotated[Path, Argument("Records with a prompt, a chosen and a rejected answer.")],
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

    run = _Run(options, model, data, f"{PAIRS} {options.format or ''}", write_pairs, pair_items)
    return run.train(summary, nproc, list(changes or ()), as_json)


def reinforce(
    options: ReinforceOptions,
    model: Model,
    prompts: Annotated[Path, Argument("Records with a prompt, and what the reward needs of each.")],
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
    run = _Run(options, model, prompts, kind, write_prompts, prompt_items)
    return run.train(summary, 1, list(changes or ()), as_json)


Either = PreferOptions | ReinforceOptions


class _Run:
    """The run of a command. kind: of the data; write: writes its shards; items: of a record, to be shown."""

    def __init__(
        self,
        options: PreferOptions | ReinforceOptions,
        model: str,
        data: Path,
        kind: str,
        write: "Write",
        items: "Items",
    ) -> None:
        self.options, self.model = options, str(Path(model).resolve()) if Path(model).exists() else model
        self.data, self.kind, self.write, self.items = data, kind, write, items
        self.folder = options.out or Path("runs", f"{Path(self.model).stem}-{data.stem}")

    def train(self, summary: "Summary", nproc: int, changes: list[str], as_json: bool) -> int:
        """Prepare, train, and say how to serve the result; the exit status."""
        from roofline.cli.training.before_after import BeforeAfter, Served, run
        from roofline.train.finetune import plan
        from roofline.train.finetune.prepare import read_prompts

        options = self.options
        prepared, notes = self._prepared(changes)
        if prepared is None:
            return 0
        settings, more = self._settings(prepared)
        path = plan.write(settings, self.folder)
        for line in (f"{self.data}: {summary(prepared)}; {settings['max_duration'][:-2]} steps", *notes, *more):
            print(line, file=sys.stderr)
        outcome = self.folder / ("model" if options.method == "full" else "adapter")
        served = Served(self.model, outcome, options.port, options.rank)
        around = BeforeAfter(served, read_prompts(self.folder / plan.DATA, options.ask), self.folder)
        return run(around, path, changes, nproc=nproc, as_json=as_json, serve=options.serve)

    def _settings(self, prepared: "Prepared") -> "tuple[JsonObject, list[str]]":
        """The run's configuration, and what of it is otherwise than the options say."""
        from roofline.train.finetune import plan
        from roofline.train.preference.options import configuration

        options = self.options
        precision, notes = plan.precision_of(options.as_finetune(options.batch, prepared.pack), plan.computes_on_cpu())
        return configuration(self.model, options, prepared, self.folder, precision), notes

    def _prepared(self, changes: list[str]) -> "tuple[Prepared | None, list[str]]":
        """What is trained on, None where it was only to be shown; and what was left out."""
        from roofline.bundle import load_text_of
        from roofline.cli.run.prepare import pull
        from roofline.train.config.read import parse_config
        from roofline.train.config.schema import ModelSection
        from roofline.train.finetune import plan
        from roofline.train.finetune.encode import Encoder
        from roofline.train.finetune.prepare import prepare
        from roofline.train.model.shapes import files
        from roofline.train.preference.prepare import preview
        from roofline.weights.checkpoint import read_config

        options, pack = self.options, isinstance(self.options, PreferOptions) and self.options.pack
        pull(self.model)
        words, template = load_text_of(self.model)
        section = ModelSection(name="hf_causal_lm", pretrained_model_name_or_path=self.model)
        longest = int(read_config(files(section))["max_position"])
        chosen = plan.data_of(self.data, options.as_finetune(options.batch, pack), longest)
        chosen = replace(chosen, form=self.kind)
        if options.show:
            encoder = Encoder(words, template, chosen.length)
            for line in preview(chosen, encoder, self.items, options.show, sys.stdout.isatty()):
                print(line)
            return None, []
        # What is wrong with the options is said before minutes of preparation.
        parse_config(self._settings(plan.stand_in(chosen.length))[0], "options", changes)
        afresh = not plan.has_begun(self.folder)
        prepared = prepare(chosen, self.folder / plan.DATA, words, template, self.write, may_replace=afresh)
        left_out = f"{prepared.left_out:,} of {prepared.records:,} records do not fit: --max-seq-len raises the limit"
        return prepared, [left_out] if prepared.left_out else []


if TYPE_CHECKING:
    from collections.abc import Callable

    Summary = Callable[[Prepared], str]
