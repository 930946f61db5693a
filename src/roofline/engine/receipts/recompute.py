"""Computing the answers of a receipt again, and finding the first step that differs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from roofline.common.errors import RooflineError
from roofline.engine.local import LocalEngine
from roofline.engine.receipts.receipt import COMMON_NOISE, Receipt, ReceiptChoice

TextEnd = Callable[
    [ReceiptChoice], bool
]  # whether the text of a choice's ids ends where its stop string says, or has none


@dataclass(frozen=True)
class AnswerDifference:
    """The first step in which an answer differs. what: the bits of its logits, the id sampled from the same logits, or
    whether the answer ends there."""

    choice: int
    step: int
    what: Literal["logits", "id", "end"]


@dataclass
class _Again:
    """An answer that is computed again."""

    ids: list[int]
    digests: list[bytes]
    finish_reason: str = ""
    stop_id: int | None = None


def recompute(
    engine: LocalEngine, receipt: Receipt, prompts: Sequence[Sequence[int]], text_end: TextEnd | None = None
) -> AnswerDifference | None:
    """Compute all answers of a receipt again, alone, and compare every id and every digest; None: they are the same.

    Where an answer ends is compared too. It ends with an id that ends answers, with its form, at its longest length, or
    at the end of the context, which is `max_model_len` of this engine; or at a stop string that its text has there, as
    `text_end` says. Without that, no stop string explains an end.

    prompts: the ids of each prompt of the receipt. The engine has loaded the receipt's adapter. Raises RequestError and
    CapacityError where this engine cannot compute them, such as ids outside its vocabulary, and RooflineError where it
    fails.
    """
    again = [_run(engine, receipt, prompt, number) for number, prompt in enumerate(prompts)]
    for at, choice in enumerate(receipt.choices):
        answer = again[choice.prompt][choice.sample]
        place = _first_difference(choice, answer)
        if place is None:
            longest = receipt.sampling.max_tokens or engine.limits.max_model_len - len(prompts[choice.prompt])
            if not _ends_there(choice, receipt, answer, longest, text_end):
                place = len(choice.ids) - 1, "end"
        if place is not None:
            return AnswerDifference(at, *place)
    return None


def _run(engine: LocalEngine, receipt: Receipt, prompt: Sequence[int], number: int) -> dict[int, _Again]:
    """The answers to one prompt, by sample, each as long as the longest of them."""
    lengths = {choice.sample: len(choice.ids) for choice in receipt.choices if choice.prompt == number}
    again = {sample: _Again([], []) for sample in range(receipt.sampling.n)}
    if not lengths:
        return again
    params = receipt.sampling.params(max(lengths.values()))
    common = receipt.version == COMMON_NOISE
    adapter = receipt.adapter or ""
    name = engine.submit(prompt, params, common_noise=common, eos_ids=receipt.end_ids, adapter=adapter)
    for sample in again.keys() - lengths.keys():
        engine.abort(name, sample)
    while engine.has_work:
        for event in engine.step():
            answer = again[event.index]
            answer.ids += event.ids
            answer.digests += event.digests or []
            if event.finish_reason == "error":
                raise RooflineError(f"the answer cannot be computed again: {event.error}")
            if event.finish_reason is not None:
                answer.finish_reason, answer.stop_id = event.finish_reason, event.stop_id
    return again


def _first_difference(choice: ReceiptChoice, again: _Again) -> tuple[int, Literal["logits", "id", "end"]] | None:
    for step, (token, digest) in enumerate(zip(choice.ids, choice.digests, strict=True)):
        if step >= len(again.ids):
            return step, "end"
        if again.digests[step].hex() != digest:
            return step, "logits"
        if again.ids[step] != token:
            return step, "id"
    return None


def _ends_there(choice: ReceiptChoice, receipt: Receipt, again: _Again, longest: int, text_end: TextEnd | None) -> bool:
    """Whether an answer whose ids are right ends for the reason that the receipt gives. longest: ids of any answer."""
    if len(choice.ids) > longest or (text_end is not None and not text_end(choice)):
        return False
    if isinstance(choice.stop, str):
        return text_end is not None and choice.finish_reason == "stop" and choice.stop in receipt.sampling.stop
    if len(again.ids) != len(choice.ids) or again.finish_reason != choice.finish_reason:
        return False
    return again.stop_id == choice.stop and (choice.finish_reason == "stop" or len(choice.ids) == longest)
