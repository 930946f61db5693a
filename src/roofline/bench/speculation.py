"""What speculation gains on natural text: the same answers with and without it in turn, their ids compared.

These rows are kept apart from all others because how often a guess is right depends on the text, while the other
workloads are pseudo-random ids.
"""

import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from roofline import bundle
from roofline.backends.options import LoadOptions
from roofline.bench.engine import report, setting
from roofline.common.errors import ConfigError, RooflineError
from roofline.common.json_types import JsonObject
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.stats import EngineStats

REPEATS = 5
ANSWER = 200  # most tokens of an answer
# How answers are sampled, by the ending of a row's name.
SETTINGS: dict[str, JsonObject] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.7, "seed": 7}}


@dataclass(frozen=True)
class Answered:
    """One answer: its ids, seconds from its first id to its last, and what the engine counted from start to end."""

    ids: list[int]
    seconds: float
    stats: EngineStats

    @property
    def rate(self) -> float:
        """Tokens a second after the first one."""
        return (len(self.ids) - 1) / self.seconds if self.seconds else 0.0


def texts() -> dict[str, str]:
    """Name and prompt of each text."""
    entries = tomllib.loads((Path(__file__).parent / "texts.toml").read_text("utf-8"))
    return {name: f"{entry['instruction']}\n{entry['text']}".strip() for name, entry in entries.items()}


def row_names() -> list[str]:
    """The keys of all rows, in the order they run."""
    return [row_name(name, sampling) for name in texts() for sampling in SETTINGS]


def row_name(text: str, sampling: str) -> str:
    return f"speculate_{text}_{sampling}_out_tok_s"


def answer(engine: LocalEngine, prompt: Sequence[int], params: SamplingParams, eos_ids: Sequence[int]) -> Answered:
    """Run one request alone. Raises RooflineError when the engine fails on it."""
    ids: list[int] = []
    before, first = engine.stats(), None
    engine.submit(prompt, params, eos_ids=eos_ids)
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason == "error":
                raise RooflineError(f"the engine failed during the bench: {event.error}")
            ids += event.ids
        if ids and first is None:
            first = time.perf_counter()
    return Answered(ids, time.perf_counter() - (first or 0.0), engine.stats().since(before))


def compare(
    plain: LocalEngine, guessing: LocalEngine, prompt: Sequence[int], params: SamplingParams, eos_ids: Sequence[int]
) -> JsonObject:
    """Answer `prompt` with both engines in turn, REPEATS times, and return the record of the row.

    Raises RooflineError when an id differs: then one of the two is wrong.
    """
    without, with_ = [], []
    for _ in range(REPEATS):
        without.append(answer(plain, prompt, params, eos_ids))
        with_.append(answer(guessing, prompt, params, eos_ids))
        if with_[-1].ids != without[0].ids or without[-1].ids != without[0].ids:
            raise RooflineError("speculation changed the ids of an answer, which it must never do: please report this")
    counted = [one.stats for one in with_]
    drafted, accepted = sum(s.draft_tokens for s in counted), sum(s.accepted_tokens for s in counted)
    decode_steps = sum(max(1, s.steps - 1) for s in counted)  # all but the one that took the end of the prompt
    return {
        "prompt_tokens": len(prompt),
        "tokens": len(without[0].ids),
        "tok_s": [round(one.rate, 1) for one in with_],
        "without_tok_s": [round(one.rate, 1) for one in without],
        "ratio": round(max(one.rate for one in with_) / max(one.rate for one in without), 3),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "held": sum(s.drafts_held for s in counted),
        "tokens_per_step": round(sum(s.decode_tokens for s in counted) / decode_steps, 3),
        "draft_share": round(sum(s.draft_seconds for s in counted) / sum(one.seconds for one in with_), 4),
        "ids_equal": True,
    }


def bench_speculation(
    model: str,
    mode: Literal["ngram", "draft", "mtp"],
    rows: Sequence[str] | None = None,
    *,
    draft: str | None = None,
    tokens: int = 4,
    load: LoadOptions = LoadOptions(),
) -> JsonObject:
    """Answer each text with and without speculation.

    Args:
        draft: the draft model, for mode "draft".
        tokens: longest draft.
        rows: run only rows whose key contains one of these; None runs all.

    Raises ConfigError where `rows` name nothing, or a draft model is missing or has another vocabulary; RooflineError
    where an id differs.
    """
    chosen = [name for name in row_names() if rows is None or any(part in name for part in rows)]
    if not chosen:
        raise ConfigError(f"no row matches; the rows are: {', '.join(row_names())}")
    load = replace(load, cache_tokens=4096, max_running=8)
    loaded = bundle.load(model, replace(load, draft_tokens=tokens, guesses=mode == "mtp"))
    guesser: bundle.LoadedModel | None = None
    try:
        if draft is not None:
            guesser = bundle.load(draft, load.for_draft())
            bundle.check_draft(loaded, guesser)
        # One executable, one request at a time: the engines take turns, and neither keeps pages between requests.
        plain = LocalEngine(loaded.executable, EngineConfig(prefix_cache=False))
        config = EngineConfig(speculate=mode, speculate_tokens=tokens, prefix_cache=False)
        guessing = LocalEngine(loaded.executable, config, guesser.executable if guesser else None)
        return {
            **_rows(loaded, plain, guessing, chosen),
            **setting(loaded),
            "speculation": {"mode": mode, "draft": draft, "tokens": tokens},
            "repeats": {"in_turn": REPEATS},
        }
    finally:
        loaded.executable.close()
        if guesser is not None:
            guesser.executable.close()


def _rows(loaded: bundle.LoadedModel, plain: LocalEngine, guessing: LocalEngine, chosen: Sequence[str]) -> JsonObject:
    assert loaded.tokenizer is not None, "loaded with the text side"
    assert loaded.chat_template is not None, "loaded with the text side"
    eos_ids, rows = loaded.tokenizer.eos_ids, {}
    for text, words in texts().items():
        if loaded.chat_template.fits(loaded.tokenizer):
            prompt = loaded.chat_template.encode_chat(loaded.tokenizer, [{"role": "user", "content": words}])
        else:
            prompt = loaded.tokenizer.encode(words, add_special=True)
        for sampling, settings in SETTINGS.items():
            name = row_name(text, sampling)
            if name in chosen:
                rows[name] = compare(plain, guessing, prompt, SamplingParams(max_tokens=ANSWER, **settings), eos_ids)
    return report(rows, {"engine": "roofline", "load_s": round(loaded.load_seconds, 2)})
