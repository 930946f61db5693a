"""Computing the answers of a receipt again, and finding the first step that differs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from roofline.common.errors import RooflineError
from roofline.engine.local import LocalEngine
from roofline.engine.receipts.receipt import Choice, Receipt


@dataclass(frozen=True)
class Difference:
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


def recompute(engine: LocalEngine, receipt: Receipt, prompts: Sequence[Sequence[int]]) -> Difference | None:
    """Compute all answers of a receipt again, alone, and compare every id and every digest; None: they are the same.

    prompts: the ids of each prompt of the receipt. The engine has loaded the receipt's adapter. Raises RequestError and
    CapacityError where this engine cannot compute them, such as ids outside its vocabulary, and RooflineError where it
    fails.
    """
    again = [_run(engine, receipt, prompt, number) for number, prompt in enumerate(prompts)]
    for at, choice in enumerate(receipt.choices):
        answer = again[choice.prompt][choice.sample]
        place = _first_difference(choice, answer)
        if place is None and not _ends_there(choice, receipt, answer):
            place = len(choice.ids) - 1, "end"
        if place is not None:
            return Difference(at, *place)
    return None


def _run(engine: LocalEngine, receipt: Receipt, prompt: Sequence[int], number: int) -> dict[int, _Again]:
    """The answers to one prompt, by sample, each as long as the longest of them."""
    lengths = {choice.sample: len(choice.ids) for choice in receipt.choices if choice.prompt == number}
    again = {sample: _Again([], []) for sample in range(receipt.sampling.n)}
    if not lengths:
        return again
    params = receipt.sampling.params(max(lengths.values()))
    name = engine.submit(prompt, params, eos_ids=receipt.end_ids, adapter=receipt.adapter or "")
    for sample in again.keys() - lengths.keys():
        engine.abort(name, sample)
    while engine.has_work:
        for event in engine.step():
            answer = again[event.index]
            answer.ids += event.ids
            answer.digests += event.digests or []
            if event.finish_reason == "error":
                raise RooflineError(f"the answer cannot be computed again: {event.error}")
            answer.finish_reason = event.finish_reason or answer.finish_reason
    return again


def _first_difference(choice: Choice, again: _Again) -> tuple[int, Literal["logits", "id", "end"]] | None:
    for step, (token, digest) in enumerate(zip(choice.ids, choice.digests, strict=True)):
        if step >= len(again.ids):
            return step, "end"
        if again.digests[step].hex() != digest:
            return step, "logits"
        if again.ids[step] != token:
            return step, "id"
    return None


def _ends_there(choice: Choice, receipt: Receipt, again: _Again) -> bool:
    """Whether an answer whose ids are right ends for the reason that the receipt gives. Stop strings are not looked for
    again: what they end is known from the text."""
    if choice.finish_reason == "length":
        longest = receipt.sampling.max_tokens
        return longest is None or len(choice.ids) == longest
    if isinstance(choice.stop, str):
        return choice.stop in receipt.sampling.stop
    return again.finish_reason == "stop" and len(again.ids) == len(choice.ids)
