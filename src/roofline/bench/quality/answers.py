"""Greedy answers of a model to prompts whose answers are known, with an adapter or without, in a process of its own."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import RooflineError
from roofline.common.json_types import JsonMapping

if TYPE_CHECKING:
    from roofline.engine.llm import LLM

MOST_TOKENS = 512  # of an answer
_RANK = 64  # places in the engine are for adapters up to it, or of their own rank


def answer(model: str, prompts: Sequence[JsonMapping], adapter: Path | None = None) -> list[str | None]:
    """What the model says to each prompt; None where it does not fit into the model's context.

    The process of its own gives back all memory, and takes no cores from a run in this one once it has ended.

    Args:
        prompts: each with `messages` and maybe `tools`, or with a `prompt`; and with the `answer` of the data, whose
            length says how long answers may become.
        adapter: a folder in PEFT's format, of any rank.

    Raises as `LLM` does, and RooflineError where the process was ended.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_answer, model, list(prompts), adapter).result()
        except BrokenProcessPool as error:
            text = "its process was ended, as the system does when memory runs out: free some, or ask for fewer answers"
            raise RooflineError(text) from error


def _answer(model: str, prompts: Sequence[JsonMapping], adapter: Path | None) -> list[str | None]:
    from roofline.engine.llm import LLM
    from roofline.engine.params import SamplingParams
    from roofline.weights.adapters import read_adapter

    rank = _RANK if adapter is None else max(_RANK, read_adapter(adapter).rank)
    llm = LLM(model, max_adapters=int(adapter is not None), max_adapter_rank=rank)
    digest = None if adapter is None else llm.load_adapter(adapter)
    encoded = [_ids(llm, prompt) for prompt in prompts]
    longest = max(
        (len(llm.tokenizer.encode(str(prompt["answer"]), add_special=False)) for prompt in prompts), default=0
    )
    limit = min(MOST_TOKENS, longest * 3 // 2 + 16)
    room = llm.engine.limits.max_model_len - limit
    fitting = [number for number, ids in enumerate(encoded) if 0 < len(ids) <= room]
    outputs = llm.generate(
        [encoded[number] for number in fitting], SamplingParams(temperature=0.0, max_tokens=limit), adapter=digest
    )
    texts = {number: output.text for number, output in zip(fitting, outputs, strict=True)}
    return [texts.get(number) for number in range(len(prompts))]


def _ids(llm: "LLM", prompt: Mapping[str, object]) -> list[int]:
    """The ids of a prompt, as a server makes them."""
    from roofline.text.replies.reply_format import reply_format
    from roofline.text.templates.tools import with_tools_as_text

    if "prompt" in prompt:
        return llm.encode(str(prompt["prompt"]))
    messages, tools = prompt["messages"], prompt.get("tools")
    assert isinstance(messages, list)
    form = reply_format(llm.chat_template.source)
    if tools is not None and not form.takes_tools:
        messages, tools = with_tools_as_text(messages, tools, form), None  # type: ignore[arg-type]
    return llm.chat_template.encode_chat(llm.tokenizer, messages, tools=tools)  # type: ignore[arg-type]
