"""What commands do around a run for people: answers before and after, and the server of both models."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from roofline.cli.output import print_json
from roofline.common.errors import RooflineError
from roofline.common.json_types import JsonObject
from roofline.train.report.answers import (
    HeldOutAnswer,
    HeldOutAnswers,
    held_out_rewards,
    link,
    read_answers,
    write_answers,
)
from roofline.train.run_folder import LOG, PAGE, read_lines

PORT, RANK = 8000, 64  # of `roofline serve`, where nothing else is said
_NAME = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class ServedModels:
    """How the model is served as it was and as it became. outcome: the folder that the run writes, RUN/adapter or
    RUN/model; rank: of an adapter; merged: what it changes that is served merged alone
    (`ops.adapters.served_merged`), "": nothing."""

    model: str
    outcome: Path
    port: int = PORT
    rank: int = 0
    merged: str = ""

    @property
    def is_adapter(self) -> bool:
        return self.outcome.name == "adapter"

    @property
    def before(self) -> str:
        """The model's name: of a file or a folder its own."""
        path = Path(self.model)
        return _NAME.sub("-", path.name if path.is_dir() else path.stem) if path.exists() else self.model

    @property
    def after(self) -> str:
        """That of the run's folder."""
        name = _NAME.sub("-", self.outcome.resolve().parent.name)
        return name if name != self.before else f"{name}-tuned"

    @property
    def merge(self) -> list[str]:
        """The command that puts the adapter into the model."""
        return ["roofline", "merge", self.model, str(self.outcome), "--output", str(self._merged), "--to", "bf16"]

    @property
    def _merged(self) -> Path:
        return self.outcome.with_name("merged")

    @property
    def command(self) -> list[str]:
        """Serves both."""
        words = ["roofline", "serve", self.model]
        words += ["--served-model-name", self.before] if self.before != self.model else []
        words += ["--adapter" if self._beside else "--extra-model", f"{self.after}={self._place}", *self._room]
        return words + (["--port", str(self.port)] if self.port != PORT else [])

    @property
    def chat(self) -> list[str]:
        """Asks it as it became, in a terminal."""
        adapter = ["--adapter", str(self._place), *self._room]
        return ["roofline", "chat", *([self.model, *adapter] if self._beside else [str(self._place)])]

    @property
    def _beside(self) -> bool:
        """Whether the outcome is loaded beside the model, and is none itself."""
        return self.is_adapter and not self.merged

    @property
    def _place(self) -> Path:
        return self._merged if self.merged else self.outcome

    @property
    def _room(self) -> list[str]:
        return ["--max-adapter-rank", str(self.rank)] if self._beside and self.rank > RANK else []

    def start(self) -> None:
        """Become that server, in place of this process."""
        os.execv(sys.executable, [sys.executable, "-m", *self.command])

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class BeforeAfter:
    """The answers to held-out prompts, which the page of the run shows. prompts: as prepared; folder: the run's.

    rewarded: what counts is the reward that the run gives to answers, and not whether they are those of the data.
    """

    def __init__(
        self, served: ServedModels, prompts: Sequence[JsonObject], folder: Path, rewarded: bool = False
    ) -> None:
        self.served, self.folder, self._rewarded = served, folder, rewarded
        self.prompts = [prompt for prompt in prompts if str(prompt["answer"]).strip()]
        rows = tuple(HeldOutAnswer(_prompt_text(prompt), str(prompt["answer"])) for prompt in self.prompts)
        commands, system = [served.merge] * bool(served.merged) + [served.command], _common_system(self.prompts)
        command = " && ".join(map(shlex.join, commands))
        self.answers = HeldOutAnswers(
            before=served.before, after=served.after, command=command, address=served.address, system=system, rows=rows
        )

    def begin(self) -> None:
        """Ask the model as it is, unless an earlier attempt of the same run did."""
        earlier = read_answers(self.folder)
        if earlier is not None and [row.expected for row in earlier.rows] == [
            row.expected for row in self.answers.rows
        ]:
            texts = [row.before for row in earlier.rows]
        else:
            texts = self._texts(self.served.model)
        self._keep(tuple(replace(row, before=text) for row, text in zip(self.answers.rows, texts, strict=True)))

    def end(self) -> None:
        """Ask it as it became, and write the page again."""
        from roofline.train.report import page

        served = self.served
        texts = self._texts(served.model, served.outcome) if served.is_adapter else self._texts(str(served.outcome))
        self._keep(tuple(replace(row, after=text) for row, text in zip(self.answers.rows, texts, strict=True)))
        page.write(self.folder)

    def summary(self) -> list[str]:
        """What came of the run and where to look, in words."""
        lines, result = list[str](), self.result()
        if "reward" in result and None not in result["reward"].values():
            before, after = (f"{result['reward'][when]:.3f}" for when in ("before", "after"))
            lines.append(f"mean reward of greedy answers to held-out prompts: {before} before, {after} after")
        if "exact" in result and None not in result["exact"].values():
            before, after = ("{} of {}".format(*result["exact"][when]) for when in ("before", "after"))
            lines.append(f"held-out answers exactly as in the data: {before} before, {after} after")
        lines.append(f"page of the run: {(self.folder / PAGE).resolve().as_uri()}")
        if self.served.merged:
            lines.append(f"merge it: {shlex.join(self.served.merge)}")
        lines.append(f"serve it: {shlex.join(self.served.command)}")
        system = ["--system", self.answers.system] if self.answers.system else []
        lines.append(f"chat with it here: {shlex.join([*self.served.chat, *system])}")
        names = (self.served.before, self.served.after)
        return [*lines, *(f"then chat with {name}: {link(self.answers, name)}" for name in names)]

    def result(self) -> JsonObject:
        """Before and after the run, the mean reward, or how many answers are those of the data and how many were asked
        for; null where none was."""
        if not self._rewarded:
            return {"exact": {"before": self.answers.exact_before, "after": self.answers.exact_after}}
        before, after = held_out_rewards(read_lines(self.folder / LOG))
        return {"reward": {"before": before, "after": after}}

    def _texts(self, model: str, adapter: Path | None = None) -> list[str | None]:
        """What it says to each prompt; a model that cannot be asked says nothing, and why goes to stderr: it can be
        trained all the same."""
        from roofline.bench.quality.answers import answer

        try:
            return answer(model, self.prompts, adapter) if self.prompts else []
        except RooflineError as error:
            print(f"{model} was not asked for answers: {error}", file=sys.stderr)
            return [None] * len(self.prompts)

    def _keep(self, rows: tuple[HeldOutAnswer, ...]) -> None:
        self.answers = replace(self.answers, rows=rows)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_answers(self.answers, self.folder)


def run(around: BeforeAfter, path: Path, changes: Sequence[str], *, nproc: int, as_json: bool) -> int:
    """Train as the file of a configuration says, ask the model before and after, and print what came of it; the exit
    status. changes: of the configuration, as `--set` has them."""
    from roofline.train.config.read import read_config
    from roofline.train.run import preflight

    read_config(path, changes, preflight.faults)  # what is wrong with it is said before the model is asked
    try:
        around.begin()
        status, result = _train(path, changes, nproc, as_json)
    except KeyboardInterrupt as abort:
        words = "Aborted! The same command goes on from the last checkpoint, if there is one."
        raise KeyboardInterrupt(words) from abort
    if status:
        if status > 128 and as_json:  # without it the console says so
            print("the same command goes on from there", file=sys.stderr)
        return status
    around.end()
    served = around.served
    if as_json:
        places = {"folder": str(around.folder), "outcome": str(served.outcome), "serve": around.answers.command}
        print_json(result | places | around.result())
    else:
        print("\n".join(around.summary()))
    return 0


def _train(path: Path, changes: Sequence[str], nproc: int, quiet: bool) -> tuple[int, JsonObject]:
    """Train as the file says; the exit status, and figures of the run. quiet: print nothing on stdout."""
    from roofline.train.config.read import read_config
    from roofline.train.report import cards
    from roofline.train.run import preflight
    from roofline.train.run_folder import folder_of

    settings = read_config(path, changes, preflight.faults)
    if nproc > 1:
        from roofline.train.run.launch import launch

        status = launch(nproc, path, changes, out=2 if quiet else None)
    else:
        from roofline.cli.training.engine_sampler import sampler_of
        from roofline.train.report.console import Console
        from roofline.train.run.loop import train

        console = Console(settings)
        finished = train(settings, console.show, make_sampler=sampler_of(settings))
        status = finished.status
        if not quiet:
            console.end(finished)
    return status, {} if status else {"card": cards.read(str(folder_of(settings)))}


def _prompt_text(prompt: JsonObject) -> str:
    """A prompt for people: what the user wrote last."""
    if "prompt" in prompt:
        return str(prompt["prompt"])
    users = [message for message in prompt["messages"] if message["role"] == "user"]
    return str((users or prompt["messages"])[-1]["content"])


def _common_system(prompts: Sequence[JsonObject]) -> str:
    """The system prompt that all of them begin with; "" where there is none, or another."""
    first = {
        prompt["messages"][0]["content"] if prompt.get("messages", [{}])[0].get("role") == "system" else ""
        for prompt in prompts
    }
    return str(first.pop()) if len(first) == 1 else ""
