"""The models that `--extra-model` names, made from the options of the first one."""

import asyncio
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.engine.config import EngineConfig
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine
from roofline.hardware.detect import detect
from roofline.server.adapters import named_path
from roofline.server.complete_text import complete_text
from roofline.server.context import Context
from roofline.server.golden import GoldenCheck, GoldenState
from roofline.server.models import ExtraModel, Models, engine_bytes, source_bytes
from roofline.server.options import ServeOptions
from roofline.server.text_side import TextSide, load_text
from roofline.weights import sources

if TYPE_CHECKING:
    from roofline.engine.facade import AsyncEngine

SHARE = 0.75  # of the machine's memory, where no budget is given
FILE_NAME = re.compile(r"[^A-Za-z0-9._-]")


def check_extra_models(options: ServeOptions) -> None:
    """Raises ConfigError for names that two models would have, and for models that are not here."""
    by_name = [named_path(spelling, "model") for spelling in options.extra_model or ()]
    adapters = [named_path(spelling)[0] for spelling in options.adapter or ()]
    names = [*options.names, *adapters, *(name for name, _ in by_name)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"extra_model: two models would be called {twice!r}: give each a name of its own")
    for name in options.pin_model or ():
        if name not in dict(by_name):
            raise ConfigError(f"pin_model={name!r} is no extra_model: give that as {name}=MODEL")
    for _, source in by_name:
        _path(source)


def make_models(options: ServeOptions, first: Context) -> Models | None:
    """The extra models beside the first one; None where there are none."""
    if not options.extra_model:
        return None
    pinned = options.pin_model or ()
    by_name = [named_path(spelling, "model") for spelling in options.extra_model]
    extra = [_extra_model(options, name, source, name in pinned) for name, source in by_name]
    budget = options.model_megabytes << 20 or int((detect().memory_total or 0) * SHARE)
    return Models(first, extra, budget, partial(_first_bytes, first.engine, options.model))


def _extra_model(options: ServeOptions, name: str, source: str, pinned: bool) -> ExtraModel:
    load = replace(options.load, max_adapters=0)
    config = _config(options.engine, name)
    spec = EngineSpec(source=source, options={**config.prepare_load(load).changes(), "text": False}, config=config)

    async def start() -> tuple[RemoteEngine, TextSide]:
        engine = RemoteEngine(spec)
        engine.launch()
        try:
            reading = asyncio.to_thread(load_text, source, load.backend, options.reply_format)
            text, ready = await asyncio.gather(reading, engine.start())
        except BaseException:
            await engine.close()
            raise
        asyncio.get_running_loop().run_in_executor(None, complete_text, text, ready.encoder, f"model {name}: ")
        return engine, text

    async def check(engine: "AsyncEngine", text: TextSide, state: GoldenState) -> None:
        await GoldenCheck(state, engine, source, load).run(text)

    return ExtraModel(name, start, _expected_bytes(source), pinned, None if options.golden_check == "off" else check)


def _config(config: EngineConfig, name: str) -> EngineConfig:
    """The first engine's for another model: with files of its own, and without the first one's draft model."""
    suffix = FILE_NAME.sub("_", name)
    return replace(
        config,
        max_adapters=0,
        speculate="off" if config.speculate == "draft" else config.speculate,
        cache_file=None if config.cache_file is None else f"{config.cache_file}.{suffix}",
        record=None if config.record is None else str(Path(config.record) / suffix),
    )


def _path(source: str) -> Path | None:
    """Where a model is; None for one that needs no files. Raises ConfigError."""
    return None if source.startswith("preset:") else sources.resolve(source)


def _expected_bytes(source: str) -> int:
    path = _path(source)
    return 0 if path is None else source_bytes(path)


def _first_bytes(engine: "AsyncEngine", source: str) -> int:
    """What the first model takes; before it is loaded, the size of its files."""
    return engine_bytes(engine) or _expected_bytes(source)
