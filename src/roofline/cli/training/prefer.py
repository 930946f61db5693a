"""roofline prefer and roofline reinforce: a model learns which answers are better, or to earn rewards for its own."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson
from roofline.cli.parser import Argument
from roofline.cli.training.finetune import Changes
from roofline.cli.training.train import Processes
from roofline.train.preference.options import PreferOptions, ReinforceOptions

if TYPE_CHECKING:
    from roofline.cli.training.told_data import Kind
    from roofline.cli.training.tuned_run import TuningTask
    from roofline.common.json_types import JsonObject
    from roofline.train.finetune.prepare import Prepared, Write
    from roofline.train.preference.prepare import ItemOf

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
    from roofline.cli.training.told_data import Kind
    from roofline.cli.training.tuned_run import TunedRun
    from roofline.train.preference.pair_files import PAIR_FORMS
    from roofline.train.preference.prepare import PAIRS, pair_item, write_pairs

    kind = Kind("pair", PAIR_FORMS, misfit="no row holds both answers; --max-seq-len raises the limit")
    task = _task(options, PAIRS, kind, write_pairs, pair_item)
    return TunedRun(model, data, task).train(nproc, changes or (), as_json)


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
    from roofline.cli.training.told_data import Kind
    from roofline.cli.training.tuned_run import TunedRun
    from roofline.train.preference.options import check_room
    from roofline.train.preference.pair_files import PROMPT_FORMS
    from roofline.train.preference.prepare import PROMPTS, answered_item, prompt_item, write_answered, write_prompts
    from roofline.train.preference.rewards import EXACT, reward_of

    check_room(options)
    reward_of(options.reward)  # before anything is loaded
    misfit = "a row has no room for an answer behind it; --max-seq-len raises the limit"
    kind = Kind("prompt", PROMPT_FORMS, misfit, options.group)
    write, item_of = (write_answered, answered_item) if options.reward == EXACT else (write_prompts, prompt_item)
    task = _task(options, f"{PROMPTS}-{options.max_new_tokens}", kind, write, item_of)
    return TunedRun(model, prompts, task).train(1, changes or (), as_json)


def _task(
    options: PreferOptions | ReinforceOptions, rows: str, kind: "Kind", write: "Write", item_of: "ItemOf"
) -> "TuningTask":
    """rows: what they hold, in place of the form of samples; item_of: what a record becomes."""
    from roofline.cli.training.tuned_run import TuningTask
    from roofline.train.preference.options import configuration
    from roofline.train.preference.prepare import preview
    from roofline.train.preference.rewards import EXACT

    def configure(model: str, prepared: "Prepared", folder: Path, precision: str) -> "JsonObject":
        return configuration(model, options, prepared, folder, precision)

    common = options.as_finetune(options.batch, pack=isinstance(options, PreferOptions) and options.pack)
    form, rewarded = f"{rows} {options.format or ''}", isinstance(options, ReinforceOptions) and options.reward != EXACT
    return TuningTask(
        options=common,
        form=form,
        kind=kind,
        configure=configure,
        show=partial(preview, item_of=item_of),
        write=write,
        rewarded=rewarded,
    )
