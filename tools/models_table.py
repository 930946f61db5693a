"""Writes docs/models.md, the table of model families, from the cases that the tests run.

python -m tools.models_table            # measure every case beside transformers, and write it
"""

import math
import sys
from pathlib import Path

from tests.models.parity_cases import CASES, GREEDY, Parity, measure

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = f"""\
# Models

What runs, and how near it comes to transformers. Each row is a small model with random weights that exercises what it
names, read from a configuration as transformers saves it; `python -m tools.models_table` measures the rows and writes
this page, and `tests/models/test_families.py` measures them again.

Each is computed twice. In float32 torch, as training computes and the reference checks: its largest difference of a
logit is rounding. On the cpu backend, where attention rounds queries, keys, values and weights to 16 bits: that is the
difference in the column `cpu`. Logits have a standard deviation of about 0.8. Then {GREEDY} tokens are chosen, each the
likeliest, through the cache of each: how many of them transformers would choose at the same place. Where one differs,
its two likeliest were nearly equal.

`longrope` (Phi-3, Phi-4) has one set of factors for texts up to the original context and one for longer ones, and
transformers changes between them with the length of each text. Here equal prefixes give equal bits, so one set holds
for all that is served: the long one, unless `max_model_len` is at most the original context. `max_position_embeddings`
says which set training has. A compiled bundle has the long one, and refuses to be loaded for less.

| `model_type` | what the row exercises | float32 | tokens | cpu | tokens |
|---|---|---|---|---|---|
"""


def render(measured: dict[str, Parity]) -> str:
    """The page's text."""
    lines = []
    for name, found in measured.items():
        case = CASES[name]
        figures = (_rounded_up(found.eager), f"{found.eager_tokens} of {GREEDY}")
        figures += (_rounded_up(found.cpu), f"{found.cpu_tokens} of {GREEDY}")
        lines.append(f"| `{case.kind}` | {case.switches} | {' | '.join(figures)} |\n")
    return HEAD + "".join(lines)


def rows(page: str) -> list[str]:
    """The table's rows."""
    return [line for line in page.splitlines() if line.startswith("| `") and not line.startswith("| `model_type`")]


def _rounded_up(difference: float) -> str:
    """To one digit, and not below what was measured."""
    if difference == 0:
        return "0"
    unit = 10.0 ** math.floor(math.log10(difference))
    return f"{math.ceil(difference / unit) * unit:.0e}"


def main() -> None:
    measured = {}
    for name, case in CASES.items():
        measured[name] = measure(case.config)
        print(name, measured[name], file=sys.stderr, flush=True)
    PAGE.write_text(render(measured), "utf-8")


if __name__ == "__main__":
    main()
