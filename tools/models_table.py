"""Writes docs/models.md, the table of model families, from the cases that the tests run.

python -m tools.models_table            # measure every case beside transformers, and write it
python -m tools.models_table NAME ...   # measure cases of that name alone; the rows of the others stay as they are
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.models.parity_cases import CASES, ENCODERS, GREEDY, LENGTHS, WRAPPED, Case, Parity, measure, measure_encoder
from tools.model_count import with_count

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = f"""\
# Models

What runs, and how near it comes to transformers. Each row is a small model with random weights that exercises what it
names, read from a configuration as transformers saves it; `python -m tools.models_table` measures the rows and writes
this page, and `tests/models/test_families.py` measures them again.

<!-- count: python -m tools.model_count -->
<!-- end of count -->

Each is computed twice. In float32 torch, as training computes and the reference checks: its largest difference of a
logit is rounding. On the cpu backend, where attention rounds queries, keys, values and weights to 16 bits: that is the
difference in the column `cpu`. Logits have a standard deviation of about 0.8. Then {GREEDY} tokens are chosen, each the
likeliest on the cpu backend, and read through the cache of each: at how many of these places what is likeliest there is
so for transformers too. Where one of a model without experts differs, its two likeliest were nearly equal: of 1,536
tokens of two small llamas 7 were others, whose log-probability was at most 0.006 below the best.

With experts a difference may be larger. Where a token's experts are nearly equal for the router, 16-bit attention may
turn the choice over, and another expert computes something else. Of 768 tokens each of five small random models, beside
transformers in float32:

| | other tokens | the largest log-probability lost |
|---|---|---|
| Mixtral, 2 of 5 experts | 11 | 1.22 |
| gpt-oss, 2 of 5 experts, 4 layers | 23 | 0.71 |
| DeepSeek-V2, 2 of 6 experts | 5 | 0.22 |
| Qwen3-MoE, 2 of 8 experts | 5 | 0.04 |
| Qwen2-MoE, 2 of 8 experts | 5 | 0.004 |
| Mixtral, 5 of 5 experts | 1 | 0.003 |
| gpt-oss, 5 of 5 experts, 4 layers | 4 | 0.007 |

In the last two rows there is nothing to turn over. The reference in float32 (`--backend reference --arithmetic plain`)
chose every token of all of them as transformers does. Prompts had 1 to 90 tokens, answers 64, on 2026-11-27.

`longrope` (Phi-3, Phi-4) has one set of factors for texts up to the original context and one for longer ones, and
transformers changes between them with the length of each text. Here equal prefixes give equal bits, so one set holds
for all that is served: the long one, unless `max_model_len` is at most the original context. `max_position_embeddings`
says which set training has. A compiled bundle has the long one, and refuses to be loaded for less.

Of models that read pictures or sound too (`gemma3`, `gemma3n`, `gemma4`, `gemma4_unified`, `glm4v_moe`, `kimi_k25`,
`llava`, `mistral3`, `qwen3_vl`, `qwen3_vl_moe`) the text part is read, from their own folders and from transformers'
models in memory; a load and `roofline info` say what is not used. Requests with pictures, and prompts with ids that
stand for them, are refused. The text part may be of any type that the table has, where transformers lets it be
(`mistral3`, `llava`). Written as GGUF or safetensors it is a text model of its own: that of Qwen3-VL is a Qwen3.

| `model_type` | what the row exercises | float32 | tokens | cpu | tokens |
|---|---|---|---|---|---|
"""


_LENGTHS = ", ".join(map(str, LENGTHS[:-1]))
ENCODERS_HEAD = f"""
Encoders give vectors of texts and generate none: `roofline serve` has `/v1/embeddings`, `/rerank` and `/score` of them,
Python `LLM.embed` and `LLM.score`. `xlm-roberta` is read as `roberta` is. They run on the cpu and reference backends,
in one process, from config.json and from GGUF files (`bert`); GPUs, several ranks, training and heads that classify
(`BertForSequenceClassification`) are refused by name. The largest difference of a value of the last hidden rows, whose
standard deviation is about 1, over texts of {_LENGTHS} and {LENGTHS[-1]} tokens, which is the longest:

| `model_type` | what the row exercises | float32 | cpu |
|---|---|---|---|
"""


def row(case: Case, found: Parity) -> str:
    """The line of a case."""
    figures = (_rounded_up(found.eager), f"{found.eager_tokens} of {GREEDY}")
    figures += ("–", "–") if found.cpu is None else (_rounded_up(found.cpu), f"{found.cpu_tokens} of {GREEDY}")
    return f"{_start(case)}{' | '.join(figures)} |"


def encoder_row(case: Case, differences: tuple[float, float]) -> str:
    """The line of an encoder's case."""
    return f"{_start(case)}{' | '.join(map(_rounded_up, differences))} |"


def render(lines: Mapping[str, str]) -> str:
    """The page's text. lines: of each case by its name."""
    decoders, encoders = ("".join(f"{lines[name]}\n" for name in cases) for cases in (CASES | WRAPPED, ENCODERS))
    return with_count(HEAD + decoders + ENCODERS_HEAD + encoders)


def kept_rows(page: str) -> dict[str, str]:
    """The lines of the cases that a page has, by their names."""
    lines = rows(page)
    starts = {name: _start(case) for name, case in (CASES | WRAPPED | ENCODERS).items()}
    return {name: line for name, start in starts.items() for line in lines if line.startswith(start)}


def rows(page: str) -> list[str]:
    """The rows of both tables."""
    return [line for line in page.splitlines() if line.startswith("| `") and not line.startswith("| `model_type`")]


def _start(case: Case) -> str:
    return f"| `{case.kind}` | {case.switches} | "


def _rounded_up(difference: float) -> str:
    """To one digit, and not below what was measured."""
    if difference == 0:
        return "0"
    unit = 10.0 ** math.floor(math.log10(difference))
    return f"{math.ceil(difference / unit) * unit:.0e}"


def main(names: Sequence[str]) -> None:
    """Write the page. names: of the cases to measure, all where there are none."""
    lines = kept_rows(PAGE.read_text("utf-8")) if names else {}
    for name in names or (*CASES, *WRAPPED, *ENCODERS):
        if name in CASES:
            lines[name] = row(CASES[name], measure(CASES[name].config))
        elif name in WRAPPED:
            lines[name] = row(WRAPPED[name], measure(WRAPPED[name].config, WRAPPED[name].kind))
        else:
            lines[name] = encoder_row(ENCODERS[name], measure_encoder(ENCODERS[name].config))
        print(lines[name], file=sys.stderr, flush=True)
    PAGE.write_text(render(lines), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
