"""The request beside a receipt: read by the server's own readers, and compared with what the receipt says of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError, RequestError
from roofline.common.json_types import JsonObject

if TYPE_CHECKING:
    from roofline.engine.llm import LLM
    from roofline.engine.receipts.receipt import Receipt
    from roofline.server.generation import Generation

MAX_REQUEST = 64 << 20  # bytes


@dataclass(frozen=True)
class SentRequest:
    """A request that fits its receipt, or what does not. generation: as a server reads the body. other: what the
    receipt has otherwise, in a sentence; kind: "other prompt" or "other request". unknown: what cannot be compared.
    readings: the body in each way of servers that fits the receipt."""

    generation: "Generation"
    other: str = ""
    kind: str = ""
    unknown: str = ""
    readings: tuple["Generation", ...] = ()


def read_sent(path: Path, receipt: "Receipt", llm: "LLM") -> SentRequest:
    """A request's body, compared with a receipt. Raises ConfigError for one that cannot be computed here.

    What a server asks of a model's answer, and how it takes the answer apart, depends on the formats of its calls and
    of its reasoning, which a server may be told: the request fits where one of them gives what the receipt has. Several
    may, and which of them the server was told only the answer can say.
    """
    body = _body(path)
    continues = body.get("previous_response_id") is not None
    if continues and any(prompt.ids is None for prompt in receipt.prompts):
        problem = "its prompt has items of a previous response, which are not in it"
        raise ConfigError(f'{path}: {problem}: ask for a receipt with its prompt ("receipt": "with_prompt")')
    compared = [
        _compared(generation, body, receipt, continues) for generation in _generations(path, body, receipt, llm)
    ]
    fitting = [each for each in compared if not each.other]
    if not fitting:
        return compared[0]
    return replace(fitting[0], readings=tuple(each.generation for each in fitting))


def _body(path: Path) -> JsonObject:
    import msgspec

    from roofline.common.files import read_regular
    from roofline.common.json_names import repeated_name

    data = read_regular(path, MAX_REQUEST)
    try:
        body, twin = msgspec.json.decode(data), repeated_name(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no request: it is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{path} is no request: it is no JSON object")
    if twin is not None:
        raise ConfigError(f"{path} is no request: an object in it has the field {twin[:100]!r} twice")
    return body


def _generations(path: Path, body: JsonObject, receipt: "Receipt", llm: "LLM") -> Iterator["Generation"]:
    """The request as servers read it: as the model's template says, then in every other format. Raises ConfigError."""
    import msgspec

    from roofline.engine.process.main import ready
    from roofline.engine.process.messages import EngineSpec
    from roofline.engine.process.remote import RemoteEngine
    from roofline.server.context import Context
    from roofline.server.routes.openai import read
    from roofline.server.routes.responses.read import body_of, generation_of
    from roofline.server.text_side import TextSide
    from roofline.text.replies.formats.table import CALL_FORMATS
    from roofline.text.replies.reply_format import reply_format

    # Under the receipt's name; a receipt may be computed here that the server had to refuse.
    raw = msgspec.json.encode({**body, "model": receipt.model, "receipt": None})
    described = RemoteEngine(EngineSpec(source=receipt.model))  # never started: a reader looks at its description alone
    described.description, described.ready = ready(receipt.model, llm.engine, 0.0), True
    plain = Context(described, TextSide(llm.tokenizer, llm.chat_template), receipt.model, receipt.created)
    forms: list[tuple[str | None, bool | None]] = [(None, None)]
    if "prompt" not in body:
        forms += product(CALL_FORMATS, (False, True))
    for calls, thinks in forms:
        text = TextSide(llm.tokenizer, llm.chat_template, partial(reply_format, calls=calls, thinks=thinks))
        context = replace(plain, text=text)  # whose metrics take longer to make than to read a request
        try:
            if "input" in body:
                yield generation_of(body_of(raw, context), (), context)
            else:
                yield (read.chat if "messages" in body else read.completion)(raw, context)
        except RequestError as error:
            if calls is None:
                raise ConfigError(f"{path} is no request that can be computed here: {error}") from error


def _compared(generation: "Generation", body: JsonObject, receipt: "Receipt", continues: bool) -> SentRequest:
    """What of a request the receipt has otherwise."""
    from roofline.engine.receipts.receipt import ReceiptSampling

    if body.get("model") != receipt.model:
        names = f"{body.get('model')!r:.100}, and the receipt's {receipt.model!r:.100}"
        return SentRequest(generation, f"The request's model is {names}.", "other request")
    if not continues:
        problem = other_prompt(receipt, generation.prompts)
        if problem is not None:
            return SentRequest(generation, problem, "other prompt")
    params = generation.params
    if params.seed is None:  # any is right
        params = replace(params, seed=receipt.sampling.seed)
    ours, theirs = ReceiptSampling.of(params), receipt.sampling
    for name in ReceiptSampling.__struct_fields__:
        value, other = getattr(ours, name), getattr(theirs, name)
        if value != other:
            values = f"{value!r:.200}, and the receipt's {other!r:.200}"
            return SentRequest(generation, f"The request's {name} is {values}.", "other request")
    unknown = "the prompt, since its first items are of a previous response" if continues else ""
    return SentRequest(generation, unknown=unknown)


def other_prompt(receipt: "Receipt", prompts: Sequence[Sequence[int]]) -> str | None:
    """Return a sentence if these are not the prompts of the receipt."""
    from roofline.engine.receipts.receipt import hash_of_ids

    if len(prompts) != len(receipt.prompts):
        return f"The request has {len(prompts)} prompts, and the receipt is of {len(receipt.prompts)}."
    for number, (ids, prompt) in enumerate(zip(prompts, receipt.prompts, strict=True)):
        if len(ids) != prompt.tokens or hash_of_ids(ids) != prompt.sha256:
            lengths = f"{len(ids)} ids here, {prompt.tokens} there"
            return f"Prompt {number} is not that of the receipt ({lengths}): another text, template or tokenizer."
    return None
