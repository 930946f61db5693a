"""How much slower constrained streams are than free ones: 16 at a time, in turns, in one process.

python -m benchmarks.structured --model smollm2-135m --rounds 5 --threads 2
"""

import argparse
import statistics
import time

from roofline import LLM, Constraint, SamplingParams

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 40},
        "amount": {"type": "integer", "minimum": 0, "maximum": 999999},
        "kind": {"enum": ["book", "game", "tool", "food"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 4},
    },
    "required": ["name", "amount", "kind", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1000}  # longer than any answer here: all have one length
FORMS = {
    "free": None,
    "json": Constraint.of_json_schema(SCHEMA),
    "regex": Constraint.of_regex(r"([A-Z][a-z]{1,12} ){500,}"),
    "choice": Constraint.of_choice([str(i) * 600 for i in range(9)]),
}


def run(llm: LLM, constraint: Constraint | None, streams: int, tokens: int) -> float:
    """Seconds of a decode step of so many streams."""
    params = [
        SamplingParams(seed=i, temperature=0.7, max_tokens=tokens, ignore_eos=True, constraint=constraint)
        for i in range(streams)
    ]
    prompts = [f"List things that are sold in shop {i}, as JSON:" for i in range(streams)]
    before, started = llm.stats(), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, stats = time.perf_counter() - started, llm.stats()
    assert all(len(output.ids) == tokens for output in outputs), "every stream is as long as every other"
    decode = stats.decode_seconds - before.decode_seconds
    return decode / (tokens - 1) if decode else seconds / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    threads = {"threads": options.threads} if options.threads else {}
    room = options.streams * (options.tokens + 64)
    with LLM(options.model, backend=options.backend, cache_tokens=room, **threads) as llm:
        steps: dict[str, list[float]] = {name: [] for name in FORMS}
        for form in FORMS.values():  # compiled, and warm
            run(llm, form, options.streams, 8)
        for _ in range(options.rounds):
            for name, form in FORMS.items():
                steps[name].append(run(llm, form, options.streams, options.tokens))
        free = statistics.median(steps["free"])
        for name, seconds in steps.items():
            each = statistics.median(seconds)
            ratios = [a / b for a, b in zip(seconds, steps["free"], strict=True)]
            print(
                f"{name:8} {each * 1e3:8.2f} ms a step, {each / free - 1:+7.1%}; "
                f"rounds {min(ratios):.3f} to {max(ratios):.3f}"
            )


if __name__ == "__main__":
    main()
