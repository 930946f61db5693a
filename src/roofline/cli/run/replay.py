"""roofline replay: run the steps of a recording again, alone, and say whether their bits are the same."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import DEFAULT_MODEL, LoadOptions
from roofline.cli.options import MODEL_HELP, AsJson
from roofline.cli.output import print_json
from roofline.cli.parser import Argument
from roofline.common.options import Options, option

if TYPE_CHECKING:
    from roofline.backends.base import Executable
    from roofline.engine.recording.entries import Head
    from roofline.engine.recording.replay import StepOutcome

SAME, DIFFERENT, NO_END = 0, 3, 5  # exit status


@dataclass(frozen=True)
class ReplayOptions(Options):
    """What runs the steps."""

    model: str = option(DEFAULT_MODEL, MODEL_HELP, flags=("--model", "-m"))
    adapter: list[str] | None = option(
        None, "Folder of a LoRA adapter that is not where the recorded server has read it; may be repeated."
    )


@dataclass
class _Findings:
    """What came of the steps so far. compared: those of which both sides have digests; first: what the first step that
    differs, or fails here, is told by; unfinished: by file its last step, where the recording has no end of it;
    endless: files that a crash ended, or that were cut off since, with how many steps they have."""

    steps: int = 0
    tokens: int = 0
    compared: int = 0
    first: str | None = None
    unfinished: dict[str, str] = field(default_factory=dict)
    endless: dict[str, int] = field(default_factory=dict)

    def take(self, outcome: "StepOutcome", file: str, with_ids: bool) -> None:
        self.steps, self.tokens = self.steps + 1, self.tokens + outcome.tokens
        place = f"{file}, step {outcome.number}"
        self.unfinished.pop(file, None)
        if outcome.replayed_error is not None and self.first is None:
            there = f"there: {outcome.recorded_error}" if outcome.recorded_error else "there it did not fail"
            self.first = f"{place}: it fails here: {outcome.replayed_error} ({there})"
        if outcome.recorded is None:
            here = "it ran" if outcome.replayed_error is None else "it failed"
            self.unfinished[file] = f"{place}: in the recording, {outcome.recorded_error}; here {here}"
        elif with_ids and outcome.replayed is not None:
            self.compared += 1
            row = outcome.first_row
            if row is not None and self.first is None:
                request, index = outcome.answers[row] if row < len(outcome.answers) else ("?", 0)
                self.first = f"{place}: other logits in row {row}, of answer {index} of request {request}"


def command(
    place: Annotated[Path, Argument("The folder of `--record`, or one file of it.")],
    load: LoadOptions,
    options: ReplayOptions = ReplayOptions(),
    as_json: AsJson = False,
) -> int:
    """Run the steps of a recording again, alone: every step with the same digests, or the first that differs.

    Ends with status 0 where every step has the same digests, or ran, where the recording has no ids to compare them by;
    3 where a step differs or fails; 5 where none does, and a file has no end: a crash ended it, or it was cut off.
    """
    from roofline.engine.recording.entries import files_of, has_end, read_entries
    from roofline.engine.recording.replay import replay

    files = files_of(place)
    head, _ = read_entries(files[0])
    executable, findings = _load(options.model, load, head), _Findings()
    same_fingerprint, with_ids = True, True
    for path in files:
        head, _ = read_entries(path)
        same_fingerprint &= head.fingerprint == executable.fingerprint
        with_ids &= head.with_ids
        before = findings.steps
        for outcome in replay(path, executable, options.adapter or ()):
            findings.take(outcome, path.name, head.with_ids)
        if not has_end(path):
            findings.endless[path.name] = findings.steps - before
    executable.close()
    if as_json:
        print_json({**vars(findings), "with_ids": with_ids, "same_fingerprint": same_fingerprint})
    else:
        _print(findings, with_ids, same_fingerprint)
    return DIFFERENT if findings.first is not None else NO_END if findings.endless else SAME


def _load(model: str, load: LoadOptions, head: "Head") -> "Executable":
    """The model with a cache and steps as large as those of the recording, where the call does not say."""
    from roofline.bundle import load as load_model
    from roofline.cli.run.prepare import prepare
    from roofline.ops.batch import PAGE_TOKENS

    prepare(model, load.threads, load.isa, load.backend)
    drafts = max(0, head.rows - head.segments)
    sized = replace(
        load,
        cache_tokens=load.cache_tokens or head.num_pages * PAGE_TOKENS,
        state_slots=load.state_slots or head.state_slots or None,
        max_running=load.max_running or head.segments,
        max_batch_tokens=load.max_batch_tokens or head.tokens,
        draft_tokens=load.draft_tokens or -(-drafts // head.segments),
        max_adapters=load.max_adapters or head.max_adapters or None,
        max_adapter_rank=max(load.max_adapter_rank, head.adapter_rank),
    )
    return load_model(model, sized, text=False).executable


def _print(findings: _Findings, with_ids: bool, same_fingerprint: bool) -> None:
    sizes = f"{findings.steps} steps of {findings.tokens} tokens ran"
    if not same_fingerprint:
        print("The recording is of other weights, another build, chip or cache format than this.", file=sys.stderr)
    if findings.first is not None:
        print(f"{findings.first} ({sizes}).")
    elif with_ids:
        print(f"The same bits in {findings.compared} steps ({sizes}).")
    else:
        print(f"{sizes}. The recording has no ids (--record-ids), so bits were not compared.")
    for line in findings.unfinished.values():
        print(f"{line}.")
    for file, steps in findings.endless.items():
        ended = "its server still runs, a crash or a full disk ended it, or it was cut off"
        print(f"{file} has no end: {ended}. It has {steps} steps; whether there were more cannot be told.")
