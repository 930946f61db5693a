"""What commands that run a model do first: the model is here, this chip's roofs are known."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from roofline.cli.streams import checked
from roofline.common import env

if TYPE_CHECKING:
    from roofline.backends.options import LoadOptions
    from roofline.engine.config import EngineConfig
    from roofline.engine.llm import LLM
    from roofline.engine.params import SamplingParams
    from roofline.engine.stats import EngineStats

TEMPERATURE, TOP_P = 0.7, 0.9  # of a command, where neither its call nor the model's files say anything


def prepare(model: str, threads: int | None = None, isa: str | None = None, backend: str = "cpu") -> None:
    """Pull the model; for the cpu backend, measure the roofs where that was never done. Says so on stderr."""
    env.quiet_numpy()
    pull(model)
    if backend != "cpu":
        return
    from roofline.backends.cpu.roofs import ensure_roofs, stored_roofs

    if stored_roofs(threads=threads, isa=isa) is None:
        print("Measuring the roofs of this chip, once (1 s)", file=sys.stderr)
        ensure_roofs(quick=True, threads=threads, isa=isa)


def pull(model: str) -> None:
    """Pull the model unless it is here. Says so on stderr."""
    from pathlib import Path

    from roofline.bundle.reader import is_bundle

    if is_bundle(Path(model)):
        return
    from roofline.weights import sources

    stages: set[str] = set()

    def progress(stage: str, done: int, total: int | None) -> None:
        if stage not in stages:
            stages.add(stage)
            print(f"{model}: {stage}", file=sys.stderr)

    sources.resolve(model, fetch=True, progress=progress)


def load_llm(model: str, load: "LoadOptions", engine: "EngineConfig", draft: str | None = None) -> "LLM":
    """A `roofline.LLM`, its model and draft model pulled."""
    env.quiet_numpy()  # before the engine imports it
    from roofline.engine.llm import LLM

    for name in filter(None, (model, draft)):
        prepare(name, load.threads, load.isa, load.backend)
    return LLM(model, draft=draft, **{**engine.changes(), **load.changes()})


def with_place_for(
    adapter: str | None, load: "LoadOptions", engine: "EngineConfig"
) -> "tuple[str | None, LoadOptions, EngineConfig]":
    """The path of an adapter that is given as PATH or NAME=PATH, and the options of loading a model that it can be
    loaded beside; all as it is for None. The adapter's files are read first: a wrong one should cost no waiting.

    Raises ConfigError, UnsupportedError, CapacityError, as a server does at its start.
    """
    if adapter is None:
        return None, load, engine
    env.quiet_numpy()  # before the adapter's files are read with it
    import os

    from roofline.engine.config import with_places_for_adapters
    from roofline.weights.adapters import check_adapter

    place = adapter.partition("=")[2]
    path = place if place and os.path.lexists(place) and not os.path.lexists(adapter) else adapter
    check_adapter(path, engine.adapter_bytes)
    return path, *with_places_for_adapters(load, engine, 1)


def load_beside(llm: "LLM", adapter: str | None) -> str | None:
    """Load an adapter of `with_place_for` into a model, which is freed where that fails; what calls take as `adapter`.

    Raises as `LLM.load_adapter` does.
    """
    try:
        return None if adapter is None else llm.load_adapter(adapter)
    except BaseException:
        llm.close()
        raise


def system_message(text: str | None) -> list[dict[str, str]]:
    """The beginning of a conversation. Raises ConfigError where the text is none."""
    return [] if text is None else [{"role": "system", "content": checked(text, "the system message")}]


def sampling(
    llm: "LLM", params: "SamplingParams", named: frozenset[str], stop: Sequence[str] | None
) -> "SamplingParams":
    """How a command samples: as its call says by the options `named`, as the model's files recommend where it does not,
    and by TEMPERATURE and TOP_P where they recommend nothing: people are to see what the model can do."""
    values = {name: getattr(params, name) for name in named & vars(params).keys()}
    defaults = {"temperature": TEMPERATURE, "top_p": TOP_P}
    recommended = dict(llm.model.sampling)
    if "temperature" in recommended:
        defaults = {}
    stop = params.stop if stop is None else tuple(stop)
    return replace(params, **{**defaults, **recommended, **values, "stop": stop})


def confirm_roofs(llm: "LLM", stats: "EngineStats") -> "EngineStats":
    """`stats`; where their steps were faster than the stored roofs allow, those are measured again (1 s) and stored,
    and the share is one of the new roofs. Says so on stderr."""
    from roofline.hardware.roofs import TOLERANCE

    if stats.correction <= TOLERANCE:
        return stats
    from roofline.backends.cpu.executable import CpuExecutable
    from roofline.backends.cpu.roofs import ensure_roofs

    executable = llm.engine.executable
    if not isinstance(executable, CpuExecutable):
        return stats
    print("This was faster than the stored roofs allow: measuring them again (1 s)", file=sys.stderr)
    last = executable.step_cost()
    roofs = ensure_roofs(quick=True, threads=executable.threads, isa=executable.isa, again=True)
    ratio = executable.limit_seconds([last.work], roofs, executable.weight_bytes) / (last.limit_seconds or 1.0)
    return replace(stats, limit_seconds=stats.limit_seconds * ratio, correction=max(1.0, stats.correction * ratio))


def figures(stats: "EngineStats") -> dict[str, float | None]:
    """Speeds and the share of the roof over `stats`, as plain values."""
    return {
        "prefill_tokens": stats.prefill_tokens,
        "prefill_tok_s": round(stats.prefill_tokens_per_second, 1),
        "decode_tokens": stats.decode_tokens,
        "decode_tok_s": round(stats.decode_tokens_per_second, 1),
        "share_of_roof": None if stats.share_of_roof is None else round(stats.share_of_roof, 4),
        "drafted_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
    }


def figures_line(stats: "EngineStats") -> str:
    """'prefill: 2000.0 tok/s, decode: 180.0 tok/s, 61.0% of the roof'."""
    share = "roof not measured" if stats.share_of_roof is None else f"{stats.share_of_roof:.1%} of the roof"
    line = f"{stats.speeds}, {share}"
    if stats.acceptance is None:
        return line
    return f"{line}, {stats.acceptance:.0%} of {stats.draft_tokens} drafted tokens right"
