"""roofline generate: answer one prompt."""

import sys
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import LoadOptions
from roofline.cli.options import AsJson, ModelOptions
from roofline.cli.output import print_json
from roofline.cli.parser import Argument
from roofline.common.options import Option
from roofline.engine.config import EngineConfig
from roofline.engine.params import SamplingParams

if TYPE_CHECKING:
    from roofline.engine.llm import LLM, Output


def command(
    prompt: Annotated[str, Argument("The prompt; - reads it from stdin.")],
    load: LoadOptions,
    engine: EngineConfig,
    models: ModelOptions,
    params: SamplingParams = SamplingParams(max_tokens=256),
    raw: Annotated[bool, Option("Continue the text as it is, without the chat template.")] = False,
    stream: Annotated[bool, Option("Print the text as it comes.")] = True,
    as_json: AsJson = False,
) -> None:
    """Answer PROMPT, then print tokens a second and the share of the roof (on stderr)."""
    from roofline.cli.run.prepare import figures_line, load_llm

    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [{"role": "user", "content": text}]
    with load_llm(models.model, load, engine, models.draft) as llm:
        if as_json or not stream:
            output = llm.generate(text, params)[0] if raw else llm.chat(messages, params)
            if as_json:
                _print_json(llm, output)
                return
            print(output.text)
        else:
            for piece in llm.stream(text if raw else messages, params):
                print(piece, end="", flush=True)
            print()
        print(figures_line(llm.stats()), file=sys.stderr)


def _print_json(llm: "LLM", output: "Output") -> None:
    from roofline.cli.run.prepare import figures

    record = {
        "model": llm.name,
        "fingerprint": llm.model.executable.fingerprint,
        "prompt_ids": output.prompt_ids,
        "text": output.text,
        "ids": output.ids,
        "finish_reason": output.finish_reason,
        "usage": output.usage._asdict(),
        "load_seconds": round(llm.model.load_seconds, 3),
        "stats": figures(llm.stats()),
    }
    print_json(record)
