"""roofline verify: compute the answers of a receipt again, and say whether every bit is the same."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import LoadOptions
from roofline.cli.options import AsJson, ModelOptions
from roofline.cli.output import print_json
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError, RequestError
from roofline.common.json_types import JsonObject
from roofline.common.options import Option
from roofline.engine.config import EngineConfig

if TYPE_CHECKING:
    from roofline.engine.llm import LLM
    from roofline.engine.receipts.receipt import Receipt
    from roofline.engine.receipts.recompute import Difference
    from roofline.server.generation import Generation

SAME, DIFFERENT, CHANGED = 0, 3, 4  # exit status; 1: it cannot be computed, 2: the call cannot be understood
MAX_REQUEST = 64 << 20  # bytes
WHAT = {
    "logits": "its logits have other bits",
    "id": "another id is sampled, from logits with the same bits",
    "end": "it does not end there, or not for the reason that the receipt gives",
}


def command(
    receipt: Annotated[Path, Argument("A receipt, or an answer that has one, as JSON.")],
    load: LoadOptions,
    engine: EngineConfig,
    models: ModelOptions,
    request: Annotated[
        Path | None, Option("The body that was sent; needed where the receipt has no prompt, which it mostly has not.")
    ] = None,
    adapter: Annotated[
        Path | None,
        Option("Folder of the LoRA adapter that the answers were computed with, where the receipt has one."),
    ] = None,
    public_key: Annotated[Path | None, Option("The key (Ed25519, PEM) that the receipt must be signed with.")] = None,
    as_json: AsJson = False,
) -> int:
    """Compute the answers of a receipt again with the model at hand: the same bits, or the first step that differs.

    Ends with status 0 where every bit is the same, 3 where a step differs, 4 where the receipt or a text beside it was
    changed, or where it is of another key, prompt or adapter, 1 where it is none or cannot be computed.
    """
    from roofline.cli.run.prepare import load_llm
    from roofline.engine.receipts.receipt import read_answer
    from roofline.engine.receipts.recompute import recompute
    from roofline.engine.receipts.signing import broken_seal, read_public_key

    content, answer = read_answer(receipt)
    problem = broken_seal(content, read_public_key(public_key) if public_key is not None else None)
    if problem is not None:
        return _tell(as_json, CHANGED, "changed", problem)
    if request is None and any(prompt.ids is None for prompt in content.prompts):
        reason = "it has the hash of its prompt alone"
        raise ConfigError(f"{receipt}: {reason}: give the body that was sent with --request, as a file")
    _check_adapter(receipt, content, adapter)
    if adapter is not None:
        load = replace(load, max_adapters=load.max_adapters or 1)
    with load_llm(models.model, load, engine, models.draft) as llm:
        if not llm.model.executable.exact:
            raise ConfigError("answers depend here on what else is computed with them: add --exact")
        if adapter is not None and (digest := llm.load_adapter(adapter)) != content.adapter:
            problem = (
                f"{adapter} is another adapter ({digest[:16]}) than the receipt's ({(content.adapter or '')[:16]})."
            )
            return _tell(as_json, CHANGED, "other adapter", problem)
        generation = _generation_of(request, content, llm) if request is not None else None
        prompts = generation.prompts if generation is not None else [prompt.ids or [] for prompt in content.prompts]
        problem = _other_prompt(content, prompts)
        if problem is not None:
            return _tell(as_json, CHANGED, "other prompt", problem)
        problem, texts = _compare_texts(answer, content, llm, generation)
        if problem is not None:
            return _tell(as_json, CHANGED, "changed", problem)
        difference = recompute(llm.engine, content, prompts)
        reason = _reason(content, llm)
    if difference is None:
        return _tell(as_json, SAME, "same", _praise(content, reason, texts, public_key is not None))
    place = f"answer {difference.choice}, step {difference.step}"
    return _tell(as_json, DIFFERENT, "different", f"{place}: {WHAT[difference.what]}. {reason}", difference)


def _check_adapter(path: Path, receipt: "Receipt", adapter: Path | None) -> None:
    """Raises ConfigError where an adapter is missing, or is not needed."""
    if receipt.adapter is not None and adapter is None:
        reason = f"its answers were computed with the adapter of digest {receipt.adapter[:16]}"
        raise ConfigError(f"{path}: {reason}: name its folder with --adapter")
    if receipt.adapter is None and adapter is not None:
        raise ConfigError(f"{path}: its answers were computed without an adapter: leave --adapter out")


def _tell(as_json: bool, status: int, result: str, message: str, difference: "Difference | None" = None) -> int:
    """Print what came of it and return the exit status."""
    if as_json:
        place = asdict(difference) if difference is not None else None
        print_json({"result": result, "message": message, "difference": place})
    else:
        print(message)
    return status


def _generation_of(path: Path, receipt: "Receipt", llm: "LLM") -> "Generation":
    """A request's body with the ids of its prompts, made as a server makes them. Raises ConfigError."""
    import msgspec

    from roofline.common.files import read_regular
    from roofline.engine.process.main import ready
    from roofline.engine.process.messages import EngineSpec
    from roofline.engine.process.remote import RemoteEngine
    from roofline.server.context import Context
    from roofline.server.routes.openai import read
    from roofline.server.routes.responses.read import body_of, generation_of
    from roofline.server.text_side import TextSide

    raw = read_regular(path, MAX_REQUEST)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no request: it is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{path} is no request: it is no JSON object")
    if body.get("previous_response_id") is not None:
        problem = "its prompt has items of a previous response, which are not in it"
        raise ConfigError(f'{path}: {problem}: ask for a receipt with its prompt ("receipt": "with_prompt")')
    raw = msgspec.json.encode({**body, "receipt": None})  # one may be computed here that the server had to refuse
    described = RemoteEngine(EngineSpec(source=receipt.model))  # never started: a reader looks at its description alone
    described.description, described.ready = ready(receipt.model, llm.engine, 0.0), True
    context = Context(described, TextSide(llm.tokenizer, llm.chat_template), receipt.model, receipt.created)
    try:
        if "input" in body:
            return generation_of(body_of(raw, context), (), context)
        return (read.chat if "messages" in body else read.completion)(raw, context)
    except RequestError as error:
        raise ConfigError(f"{path} is no request that can be computed here: {error}") from error


def _compare_texts(
    answer: JsonObject | None, receipt: "Receipt", llm: "LLM", request: "Generation | None"
) -> tuple[str | None, str]:
    """What is wrong with the texts beside a receipt, and what is to be said of them where nothing is."""
    from roofline.cli.run.told_answer import NoTextError, changed_text
    from roofline.server.text_side import TextSide

    if answer is None:
        return None, ""
    try:
        problem = changed_text(answer, receipt, TextSide(llm.tokenizer, llm.chat_template), request)
    except NoTextError as error:
        return None, f" The texts beside the receipt were not compared, and only its ids are proven: {error}."
    return problem, " The texts beside the receipt are those of its ids."


def _other_prompt(receipt: "Receipt", prompts: Sequence[Sequence[int]]) -> str | None:
    """Whether these are not the prompts of the receipt, in a sentence."""
    from roofline.engine.receipts.receipt import hash_of_ids

    if len(prompts) != len(receipt.prompts):
        return f"The request has {len(prompts)} prompts, and the receipt is of {len(receipt.prompts)}."
    for number, (ids, prompt) in enumerate(zip(prompts, receipt.prompts, strict=True)):
        if len(ids) != prompt.tokens or hash_of_ids(ids) != prompt.sha256:
            lengths = f"{len(ids)} ids here, {prompt.tokens} there"
            return f"Prompt {number} is not that of the receipt ({lengths}): another text, template or tokenizer."
    return None


def _reason(receipt: "Receipt", llm: "LLM") -> str:
    """What the receipt's computation and this one do not share, as far as can be told."""
    from roofline.backends.base import IdentifiesWeights

    executable = llm.model.executable
    weights = executable.weights_identity if isinstance(executable, IdentifiesWeights) else ""
    if weights != receipt.weights:
        return f"The weights are others: the receipt's are {receipt.weights[:12] or 'unknown'}, these {weights[:12]}."
    fingerprint = executable.fingerprint + (f".{receipt.adapter[:16]}" if receipt.adapter is not None else "")
    if fingerprint != receipt.fingerprint:
        fingerprints = f"{receipt.fingerprint[:12]} there, {fingerprint[:12]} here"
        return (
            "The weights are the same, but program, build, instruction set, chip, cache format or number of ranks are "
            f"not ({fingerprints}), and bits are promised under one fingerprint alone."
        )
    return (
        "Weights, program and chip are said to be the same: one of the two computed wrongly (damaged memory, a changed "
        "kernel or weights that were changed after they were hashed), or the receipt was not computed as it says."
    )


def _praise(receipt: "Receipt", reason: str, texts: str, key_checked: bool) -> str:
    """The sentence for an answer that was computed as the receipt says."""
    steps = sum(len(choice.ids) for choice in receipt.choices)
    answers = f"{len(receipt.choices)} answer{'s' * (len(receipt.choices) != 1)}"
    what = f"The same bits: {answers}, {steps} steps.{texts}"
    if not reason.startswith("Weights, program"):
        what += f" {reason}"
    if receipt.signature is None:
        return f"{what} It is not signed: who computed it is not proven."
    signed = f"{what} Signed with the key {(receipt.public_key or '')[:16]}"
    return f"{signed}." if key_checked else f"{signed}, which the receipt itself names: --public-key says whose it is."
