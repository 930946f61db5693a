"""roofline verify: compute the answers of a receipt again, and say whether every bit is the same."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import LoadOptions
from roofline.cli.options import AdaptedModelOptions, AsJson
from roofline.cli.output import print_json
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.common.options import Option
from roofline.engine.config import EngineConfig

if TYPE_CHECKING:
    from roofline.engine.llm import LLM
    from roofline.engine.receipts.receipt import Receipt
    from roofline.engine.receipts.recompute import AnswerDifference
    from roofline.server.generation import Generation

SAME, DIFFERENT, CHANGED, NOT_COMPARED = 0, 3, 4, 5  # exit status; 1: it cannot be computed, 2: no call of this form
WHAT = {
    "logits": "its logits have other bits",
    "id": "from logits with the same bits another id is sampled",
    "end": "it does not end there, or not for the reason that the receipt gives",
}
DAMAGED = "damaged"  # the result in JSON


@dataclass(frozen=True)
class Verdict:
    """What came of a verification: exit status, its word in JSON, the sentences, and the first step that differs."""

    status: int
    result: str
    message: str
    difference: "AnswerDifference | None" = None


def command(
    receipt: Annotated[Path, Argument("A receipt, or an answer that has one, as JSON.")],
    load: LoadOptions,
    engine: EngineConfig,
    models: AdaptedModelOptions,
    request: Annotated[
        Path | None, Option("The body that was sent; needed where the receipt has no prompt, which it mostly has not.")
    ] = None,
    public_key: Annotated[Path | None, Option("The key (Ed25519, PEM) that the receipt must be signed with.")] = None,
    as_json: AsJson = False,
) -> int:
    """Compute the answers of a receipt again with the model at hand, and with --adapter where it names one: the same
    bits, or the first step that differs.

    Ends with status 0 where every bit is the same, 3 where a step differs, 4 where the receipt is damaged, it or a text
    beside it was changed, or it is of another key, prompt, request or adapter, 5 where the bits are the same and
    something beside them was not compared, 1 where it is none or cannot be computed.
    """
    from roofline.cli.run.prepare import load_beside, load_llm, with_place_for
    from roofline.engine.receipts.receipt import read_answer
    from roofline.engine.receipts.signing import broken_seal, damage_of, read_public_key

    content, answer = read_answer(receipt)
    damage = damage_of(content)
    if damage is not None:
        return _tell(as_json, Verdict(CHANGED, DAMAGED, damage))
    problem = broken_seal(content, read_public_key(public_key) if public_key is not None else None)
    if problem is not None:
        return _tell(as_json, Verdict(CHANGED, "changed", problem))
    if request is None and any(prompt.ids is None for prompt in content.prompts):
        reason = "it has the hash of its prompt alone"
        raise ConfigError(f"{receipt}: {reason}: give the body that was sent with --request, as a file")
    _check_adapter(receipt, content, models.adapter)
    adapter, load, engine = with_place_for(models.adapter, load, engine)
    with load_llm(models.model, load, engine, models.draft) as llm:
        if not llm.model.executable.exact:
            raise ConfigError("answers depend here on what else is computed with them: add --exact")
        if (digest := load_beside(llm, adapter)) != content.adapter:
            assert digest is not None, "a receipt with an adapter was asked for one"
            problem = (
                f"{adapter} is another adapter ({digest[:16]}) than the receipt's ({(content.adapter or '')[:16]})."
            )
            return _tell(as_json, Verdict(CHANGED, "other adapter", problem))
        verdict = judge(content, answer, request, llm)
    if verdict.status in (SAME, NOT_COMPARED):
        verdict = replace(verdict, message=verdict.message + _signed(content, public_key is not None))
    return _tell(as_json, verdict)


def _check_adapter(path: Path, receipt: "Receipt", adapter: str | None) -> None:
    """Raises ConfigError where an adapter is missing, or is not needed."""
    if receipt.adapter is not None and adapter is None:
        reason = f"its answers were computed with the adapter of digest {receipt.adapter[:16]}"
        raise ConfigError(f"{path}: {reason}: name its folder with --adapter")
    if receipt.adapter is None and adapter is not None:
        raise ConfigError(f"{path}: its answers were computed without an adapter: leave --adapter out")


def _tell(as_json: bool, verdict: Verdict) -> int:
    """Print what came of it and return the exit status."""
    if as_json:
        place = asdict(verdict.difference) if verdict.difference is not None else None
        print_json({"result": verdict.result, "message": verdict.message, "difference": place})
    else:
        print(verdict.message)
    return verdict.status


def _compare_texts(
    answer: JsonObject | None, receipt: "Receipt", llm: "LLM", requests: Sequence["Generation | None"]
) -> tuple[str | None, str]:
    """What is wrong with an answer beside its receipt, and why its texts cannot be compared, "" where they were.

    requests: the readings of the request, of which one has to give the answer; None: there is no request.
    """
    from roofline.cli.run.answer_layout import NoTextError
    from roofline.cli.run.told_answer import changed_text
    from roofline.server.text_side import TextSide

    if answer is None:
        return None, ""
    text, problems, reason = TextSide(llm.tokenizer, llm.chat_template), list[str](), ""
    for request in requests:
        try:
            problem = changed_text(answer, receipt, text, request)
        except NoTextError as error:
            reason = reason or str(error)
            continue
        if problem is None:
            return None, ""
        problems.append(problem)
    return (None, reason) if reason else (problems[0], "")


def judge(receipt: "Receipt", answer: JsonObject | None, request: Path | None, llm: "LLM") -> Verdict:
    """What comes of computing a receipt again whose hashes and seal are right, of whose adapter the engine has loaded.

    answer: what the receipt stands in; request: the file of the body that was reading.
    """
    from roofline.cli.run.sent_request import other_prompt, read_sent
    from roofline.cli.run.told_answer import ends_as_said
    from roofline.engine.receipts.recompute import recompute
    from roofline.server.text_side import TextSide

    reading = read_sent(request, receipt, llm) if request is not None else None
    if reading is not None and reading.other:
        return Verdict(CHANGED, reading.kind, reading.other)
    text, generation = TextSide(llm.tokenizer, llm.chat_template), reading.generation if reading is not None else None
    prompts: list[Sequence[int]] = [prompt.ids or () for prompt in receipt.prompts]
    if generation is not None and reading is not None and not reading.unknown:
        prompts = list(generation.prompts)
    problem = other_prompt(receipt, prompts)
    if problem is not None:
        return Verdict(CHANGED, "other prompt", problem)
    if sorted(receipt.end_ids) != sorted(text.eos_ids):
        ends = f"{receipt.end_ids!r:.200}, and the model's are {list(text.eos_ids)!r:.200}"
        return Verdict(CHANGED, "other end ids", f"The receipt's ids that end an answer are {ends}.")
    readings: Sequence[Generation | None] = reading.readings if reading is not None else (None,)
    problem, without_texts = _compare_texts(answer, receipt, llm, readings)
    if problem is not None:
        return Verdict(CHANGED, "changed", problem)
    missing = _missing_choices(receipt)
    if missing is not None:
        return Verdict(CHANGED, DAMAGED, missing)
    difference = recompute(
        llm.engine,
        receipt,
        prompts,
        lambda choice: any(ends_as_said(choice, receipt, text, request) for request in readings),
    )
    reason = _reason(receipt, llm)
    if difference is not None:
        return _differs(receipt, difference, reason)
    texts = " The texts beside the receipt are those of its ids." if answer is not None and not without_texts else ""
    if without_texts:
        texts = f" The texts beside the receipt were not compared, and only its ids are proven: {without_texts}."
    if reading is not None and reading.unknown:
        texts += f" Of the request {reading.unknown} could not be compared."
    praise = _praise(receipt, reason, texts)
    if without_texts or (reading is not None and reading.unknown):
        return Verdict(NOT_COMPARED, "not compared", praise)
    return Verdict(SAME, "same", praise)


def _differs(receipt: "Receipt", difference: "AnswerDifference", reason: str) -> Verdict:
    """The verdict where a step differs. Other logits come of another computation, as `reason` says; where the logits
    have the same bits, no machine explains the difference: it is the receipt that does not fit itself."""
    place = f"answer {difference.choice}, step {difference.step}: {WHAT[difference.what]}."
    if difference.what == "logits":
        return Verdict(DIFFERENT, "different", f"{place} {reason}", difference)
    same = "All steps up to there have the same bits, so neither machine computed wrongly."
    if receipt.signature is not None:
        cause = "It was signed as it is: whoever has its key wrote a receipt that does not fit its own parameters."
    else:
        cause = "The receipt is not whole: it was cut off, damaged or changed, and sealed again (it is not signed)."
    if (
        difference.what == "end"
        and receipt.choices[difference.choice].finish_reason == "length"
        and receipt.sampling.max_tokens is None
    ):
        cause += " Or the server's context ended there: --max-model-len says how long that was."
    return Verdict(CHANGED, DAMAGED, f"{place} {same} {cause}", difference)


def _missing_choices(receipt: "Receipt") -> str | None:
    """Which answers that the receipt's own parameters ask for it has not, in a sentence."""
    count = len(receipt.prompts) * receipt.sampling.n
    if len(receipt.choices) == count:
        return None
    return f"The receipt is not whole: it has {len(receipt.choices)} answers, and its parameters ask for {count}."


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
            "The weights are the same, but program (on GPUs also by its places for adapters), build, instruction set, "
            f"chip, cache format or number of ranks are not ({fingerprints}), and bits are promised under one "
            "fingerprint alone."
        )
    return (
        "Weights, program and chip are said to be the same: one of the two computed wrongly (damaged memory, a changed "
        "kernel or weights that were changed after they were hashed), or the receipt was not computed as it says."
    )


def _praise(receipt: "Receipt", reason: str, texts: str) -> str:
    """The sentences for an answer that was computed as the receipt says."""
    steps = sum(len(choice.ids) for choice in receipt.choices)
    answers = f"{len(receipt.choices)} answer{'s' * (len(receipt.choices) != 1)}"
    what = f"The same bits: {answers}, {steps} steps.{texts}"
    return what if reason.startswith("Weights, program") else f"{what} {reason}"


def _signed(receipt: "Receipt", key_checked: bool) -> str:
    """By whom it was computed, in a sentence."""
    if receipt.signature is None:
        return " It is not signed: who computed it is not proven."
    signed = f" Signed with the key {(receipt.public_key or '')[:16]}"
    return f"{signed}." if key_checked else f"{signed}, which the receipt itself names: --public-key says whose it is."
