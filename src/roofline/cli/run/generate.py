"""roofline generate: answer one prompt."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import LoadOptions
from roofline.cli.options import STOP_HELP, SYSTEM_HELP, AdaptedModelOptions, AsJson
from roofline.cli.output import print_json
from roofline.cli.parser import Argument, NamedOptions
from roofline.cli.streams import checked, read_text
from roofline.common.errors import ConfigError
from roofline.common.files import read_regular
from roofline.common.options import Options, option
from roofline.engine.config import EngineConfig
from roofline.engine.constraint import MAX_TEXT, Constraint
from roofline.engine.params import SamplingParams

if TYPE_CHECKING:
    from roofline.engine.llm import LLM, Output


FORM = "Form of the answer"


@dataclass(frozen=True)
class TextOptions(Options):
    """What is answered, and how the answer is printed."""

    system: str | None = option(None, SYSTEM_HELP)
    stop: list[str] | None = option(None, STOP_HELP)
    raw: bool = option(False, "Continue the text as it is, without the chat template.")
    stream: bool = option(True, "Print the text as it comes.")
    schema: Path | None = option(None, "Answer with JSON that the JSON schema in this file is valid for.", topic=FORM)
    regex: str | None = option(None, "Answer with a text that this regex matches as a whole.", topic=FORM)
    choice: list[str] | None = option(None, "Answer with this text, or with one of several.", topic=FORM)
    grammar: Path | None = option(None, "Answer with a text of the Lark grammar in this file.", topic=FORM)

    def constraint(self) -> Constraint | None:
        """The form that the answer must have. Raises ConfigError for files that cannot be read, and more than one."""
        names = [name for name in ("schema", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(names) > 1:
            raise ConfigError(f"--{names[0]} and --{names[1]} both give the answer's form: leave one of the two out")
        if self.schema is not None:
            return Constraint.of_json_schema(_text_of(self.schema))
        if self.grammar is not None:
            return Constraint.of_lark(_text_of(self.grammar))
        if self.regex is not None:
            return Constraint.of_regex(checked(self.regex, "--regex"))
        return None if self.choice is None else Constraint.of_choice(checked(text, "--choice") for text in self.choice)


def command(
    prompt: Annotated[str, Argument("The prompt; - reads it from stdin.")],
    load: LoadOptions,
    engine: EngineConfig,
    models: AdaptedModelOptions,
    params: SamplingParams = SamplingParams(max_tokens=256),
    text: TextOptions = TextOptions(),
    named: Annotated[frozenset[str], NamedOptions()] = frozenset(),
    as_json: AsJson = False,
) -> None:
    """Answer PROMPT, then print tokens a second and the share of the roof (on stderr).

    A model without a chat template, as before instruction tuning, continues PROMPT as it is.

    What is not said of sampling is what the model's files recommend, or else temperature 0.7 and top-p 0.9.
    """
    from roofline.cli.run.prepare import (
        confirm_roofs,
        figures_line,
        load_beside,
        load_llm,
        sampling,
        system_message,
        with_place_for,
    )

    if text.raw and text.system is not None:
        raise ConfigError("--raw continues a text as it is, which has no system message: leave one of the two out")
    constraint = text.constraint()
    words = read_text() if prompt == "-" else checked(prompt, "the prompt")
    messages = [*system_message(text.system), {"role": "user", "content": words}]
    adapter, load, engine = with_place_for(models.adapter, load, engine)
    with load_llm(models.model, load, engine, models.draft) as llm:
        digest = load_beside(llm, adapter)
        params = replace(sampling(llm, params, named, text.stop), constraint=constraint)
        raw = text.raw or _continues(llm, text)
        if as_json or not text.stream:
            if raw:
                output = llm.generate(words, params, adapter=digest)[0]
            else:
                output = llm.chat(messages, params, adapter=digest)
            if as_json:
                _print_json(llm, output, digest)
                return
            print(output.text)
        else:
            for piece in llm.stream(words if raw else messages, params, adapter=digest):
                print(piece, end="", flush=True)
            print()
        print(figures_line(confirm_roofs(llm, llm.stats())), file=sys.stderr)


def _continues(llm: "LLM", text: TextOptions) -> bool:
    """Whether the model has no chat template, so that it can only continue the prompt; says so on stderr. Raises
    ConfigError for a system message, which needs a template."""
    if llm.chat_template.fits(llm.tokenizer):
        return False
    if text.system is not None:
        raise ConfigError(f"{llm.name} has no chat template, so it cannot be told a system message: leave --system out")
    print(f"{llm.name} has no chat template: it continues the prompt as it is, as with --raw.", file=sys.stderr)
    return True


def _text_of(path: Path) -> str:
    data = read_regular(path, MAX_TEXT)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} after {error.start} bytes") from error


def _print_json(llm: "LLM", output: "Output", adapter: str | None) -> None:
    from roofline.cli.run.prepare import confirm_roofs, figures
    from roofline.engine.adapter_info import adapted_fingerprint

    record = {
        "model": llm.name,
        "fingerprint": adapted_fingerprint(llm.model.executable.fingerprint, adapter),
        "prompt_ids": output.prompt_ids,
        "text": output.text,
        "ids": output.ids,
        "finish_reason": output.finish_reason,
        "usage": output.usage._asdict(),
        "load_seconds": round(llm.model.load_seconds, 3),
        "stats": figures(confirm_roofs(llm, llm.stats())),
    }
    print_json(record)
