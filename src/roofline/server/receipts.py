"""Receipts beside answers: what a request must be to have one, and what goes into it. Any API may offer them."""

from dataclasses import replace
from typing import TypeVar

from roofline.common.json_types import JsonObject
from roofline.engine.params import fresh_seed
from roofline.engine.process.messages import Ready
from roofline.engine.receipts.receipt import DIGEST, VERSION, Receipt, ReceiptChoice, ReceiptSampling, prompt_of
from roofline.engine.receipts.signing import seal
from roofline.server.answers import Answers
from roofline.server.body import invalid
from roofline.server.generation import Generation

AnyGeneration = TypeVar("AnyGeneration", bound=Generation)


def with_receipt(generation: AnyGeneration, field: bool | str, loaded: Ready) -> AnyGeneration:
    """The request with what its receipt needs: a seed that is known, and digests of logits. field: what the body says,
    true or "with_prompt". Raises RequestError where nobody could compute the answer again."""
    if not field:
        return generation
    if not loaded.exact:
        raise invalid(
            "receipt", "this server's answers depend on what else is computed with them; --exact ends that on a GPU"
        )
    seed = generation.params.seed if generation.params.seed is not None else fresh_seed()
    params = replace(generation.params, seed=seed, digests=True)
    return replace(generation, params=params, receipt="with_prompt" if field == "with_prompt" else "hashes")


def receipt_of(answers: Answers, created: int) -> JsonObject | None:
    """The receipt of complete answers, None where the request wants none. Also those have a choice in it that were
    computed for `best_of` and are not told. created: Unix time."""
    generation, context = answers.generation, answers.context
    if generation.receipt is None:
        return None
    n, description = generation.params.n, context.engine.description
    choices = []
    for number, answer in enumerate(answers.choices):
        assert answer.finish_reason in ("stop", "length"), "answers that failed have no receipt"
        choices.append(
            ReceiptChoice(
                prompt=number // n,
                sample=number % n,
                finish_reason=answer.finish_reason,
                stop=answer.stop,
                ids=answer.ids,
                digests=[digest.hex() for digest in answer.digests],
            )
        )
    receipt = Receipt(
        version=VERSION,
        id=answers.id,
        created=created,
        model=generation.model,
        fingerprint=generation.fingerprint,
        weights=description.weights_identity if description is not None else "",
        adapter=answers.adapter_digest,
        digest=DIGEST,
        sampling=ReceiptSampling.of(generation.params),
        end_ids=list(context.text.eos_ids),
        prompts=[prompt_of(ids, generation.receipt == "with_prompt") for ids in generation.prompts],
        choices=choices,
    )
    return seal(receipt, context.signer).as_json()
