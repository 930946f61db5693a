"""Programs in C that answer from a bundle, and the answers that they must give."""

import re
from pathlib import Path

from roofline.bundle import load
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams

ROOT = Path(__file__).parents[2]


def documented() -> str:
    (program,) = re.findall(
        r"^```c\n(.*?)^```", (ROOT / "docs/how-to/library.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return str(program)


def greedy(path: Path, ids: list[int], count: int) -> tuple[list[int], str]:
    model = load(str(path), cache_tokens=1024, max_model_len=512)
    assert model.tokenizer is not None
    engine = LocalEngine(model.executable)
    engine.submit(ids, SamplingParams(temperature=0, max_tokens=count), eos_ids=model.tokenizer.eos_ids)
    answer = []
    while engine.has_work:
        answer += [i for event in engine.step() for i in event.ids]
    return answer, model.tokenizer.decode(answer)
