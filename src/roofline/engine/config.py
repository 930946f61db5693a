"""The engine's own settings, and their resolution against what the executable can hold."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from roofline.backends.options import LoadOptions
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.common.options import Options, declared, option, same_option

if TYPE_CHECKING:
    from roofline.backends.base import Executable

MAX_DRAFT = 15
LONG_SHARE = 6  # prompts of many steps have one part in so many of a step's tokens
ENGINE, SPECULATION, RECORDING = "Engine", "Speculation", "Recording steps"


@dataclass(frozen=True)
class EngineConfig(Options):
    """Options of an engine. Raises ConfigError, which names the option."""

    max_batch_tokens: int | None = same_option(LoadOptions, "max_batch_tokens")  # None: as the executable was loaded
    max_running: int | None = same_option(LoadOptions, "max_running")
    max_model_len: int | None = same_option(LoadOptions, "max_model_len")
    max_adapters: int | None = same_option(LoadOptions, "max_adapters")
    long_prompt_tokens: int | None = option(
        None,
        "Tokens of a step that prompts of more than four steps have together, so that whoever comes meanwhile waits "
        "for a shorter step; less where the context is long; 0: all of a step. Default: a sixth of max_batch_tokens; "
        "of `LLM` 0.",
        minimum=0, unit="tokens", topic=ENGINE,
    )  # fmt: skip
    adapter_bytes: int = option(
        4 << 30, "Memory that the LoRA adapters that are loaded may take together.",
        minimum=1, unit="bytes", topic=ENGINE,
    )  # fmt: skip
    prefix_cache: bool = option(True, "Reuse full pages of equal prefixes.", topic=ENGINE)
    scheduler: Literal["continuous", "naive"] = option(
        "continuous", "naive: one sequence at a time, its prompt in as few steps as the batch allows.", topic=ENGINE
    )
    cache_file: str | None = option(
        None,
        "File that keeps the pages of the prefix cache over a restart: read at the start, written when the engine is "
        "closed. Prompts can be worked out from it; only its owner can read it. With several replicas each has one: "
        "FILE.0, FILE.1. On backend cpu.",
        topic=ENGINE, backends=("cpu",),
    )  # fmt: skip
    cache: Literal["paged", "naive"] = option("paged", "naive: nothing is ever shared.", topic=ENGINE)
    overlap: bool = option(
        True,
        "Schedule a step while a device computes the one before; where the backend cannot queue steps, where drafts "
        "are made, and with the naive scheduler it makes no difference: one step ends before the next begins.",
        topic=ENGINE,
    )
    measure: bool = option(True, "Price each step, so that stats tell the share of the roof.", topic=ENGINE)
    speculate: Literal["off", "ngram", "draft", "mtp"] = option(
        "off",
        "Guess tokens and verify them together: from the text itself (ngram), with a second, smaller model (draft), or "
        "with the layer that some models have for it (mtp). The output is the same, bit for bit.",
        topic=SPECULATION,
    )
    speculate_tokens: int = option(4, "Longest guess.", minimum=1, maximum=MAX_DRAFT, unit="tokens", topic=SPECULATION)
    speculate_always: bool = option(
        False, "Guess also where measured times and acceptance promise a loss.", topic=SPECULATION
    )
    record: str | None = option(
        None,
        "Folder into which each step is written down, with digests of its logits, for `roofline replay`: who was "
        "computed with whom, and no texts.",
        topic=RECORDING,
    )
    record_ids: bool = option(
        False,
        "Write down the token ids too, from which the texts of all prompts and answers can be read: without them a "
        "replay has steps of the same shapes, and its bits cannot be compared.",
        topic=RECORDING,
    )
    record_megabytes: int = option(
        256, "That all recordings in the folder may have; the oldest file goes first.",
        minimum=1, maximum=8192, unit="MiB", topic=RECORDING,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.record_ids and self.record is None:
            raise ConfigError("record_ids needs record: the folder to write into")
        if self.cache_file is not None and not (self.prefix_cache and self.cache == "paged"):
            raise ConfigError("cache_file needs prefix_cache=True and cache='paged': other pages are never found again")
        if self.cache_file is not None and self.speculate == "mtp":
            reason = "the file has no places for the rows that the layer goes on from"
            raise UnsupportedError("cache_file with speculate='mtp'", reason, ("speculate='ngram'", "no cache_file"))

    def prepare_load(self, load: LoadOptions) -> LoadOptions:
        """The options of loading a model for this engine: its steps have room for the drafts that are verified.

        Raises UnsupportedError where the model's backend, or several ranks, lack something that this engine needs.
        """
        for name, about in declared(type(self)).items():
            if about.backends:
                about.check_backend(getattr(self, name), load.backend)
        if self.cache_file is not None and load.ranks > 1:
            reason = "each rank has its own share of a page"
            raise UnsupportedError("cache_file on several ranks", reason, ("tensor_parallel=1", "data_parallel"))
        if self.speculate == "off" or load.draft_tokens:
            return load
        return replace(load, draft_tokens=self.speculate_tokens, guesses=self.speculate == "mtp")


def with_places_for_adapters(load: LoadOptions, engine: EngineConfig, count: int) -> tuple[LoadOptions, EngineConfig]:
    """Both with places for so many adapters that are named, where max_adapters does not say how many there are. Raises
    ConfigError where it says fewer, UnsupportedError on several ranks."""
    places = load.max_adapters
    if count <= (places or 0):
        return load, engine
    if places is not None:
        raise ConfigError(f"max_adapters={places} has no room for the {count} of adapter (--adapter); raise it")
    return replace(load, max_adapters=count), replace(engine, max_adapters=count)


@dataclass(frozen=True)
class StepLimits:
    """What one step may hold: query tokens, sequences, logit rows, page-table entries; and the longest sequence in
    tokens. long_tokens: of `tokens` what very long prompts have together at their beginning; doubling_depth: the
    position at which one of their tokens counts twice, for its attention (None: all count once). undivided: a prompt is
    computed in one step, as an encoder's has to be."""

    tokens: int
    sequences: int
    rows: int
    table_pages: int
    max_model_len: int
    undivided: bool = False
    long_tokens: int | None = None  # None: all
    doubling_depth: int | None = None


def resolve(config: EngineConfig, executable: "Executable") -> StepLimits:
    """The limits of a step of this executable with these settings.

    Raises ConfigError where max_model_len is more than the model's positions, CapacityError where the cache, or of an
    encoder a step, cannot hold a sequence of that length, UnsupportedError for options that an encoder cannot have.
    """
    # Imported here: a server spawns its engine process before it imports numpy.
    from roofline.backends.base import is_encoder
    from roofline.engine.depth import doubling_depth
    from roofline.ops.batch import PAGE_TOKENS

    limits = executable.limits
    pages = min(executable.num_pages, limits.pages)
    longest = min(executable.max_context, pages * PAGE_TOKENS)
    max_model_len = config.max_model_len
    if max_model_len is not None and max_model_len > executable.max_context:
        positions = f"the {executable.max_context} positions of the model"
        raise ConfigError(f"max_model_len={max_model_len} is more than {positions}")
    if max_model_len is not None and max_model_len > longest:
        remedy = "Enlarge the cache or lower max_model_len."
        raise CapacityError(f"max_model_len={max_model_len}", max_model_len, longest, "tokens of cache", remedy)
    tokens = min(config.max_batch_tokens or limits.tokens, limits.tokens)
    if config.scheduler == "naive":
        tokens = limits.tokens
    encoder = is_encoder(executable)
    if encoder:
        _check_encoder(config, tokens)
        longest = min(longest, tokens)
    long_tokens = None if encoder else _long_tokens(config, tokens)
    return StepLimits(
        tokens=tokens,
        # Every running sequence may decode in the same step, so the step must hold them all.
        sequences=min(
            *(config.max_running or limits.segments, limits.segments, limits.rows, tokens),
            limits.state_slots or limits.segments,
        ),
        rows=limits.rows,
        table_pages=limits.pages,
        max_model_len=min(max_model_len or longest, longest),
        undivided=encoder,
        long_tokens=long_tokens,
        doubling_depth=None if long_tokens is None else doubling_depth(executable),
    )


def _long_tokens(config: EngineConfig, tokens: int) -> int | None:
    """What prompts of many steps may have of a step of so many tokens; None: all."""
    if config.long_prompt_tokens is None:
        return max(1, tokens // LONG_SHARE)
    return config.long_prompt_tokens or None


def _check_encoder(config: EngineConfig, tokens: int) -> None:
    """Raises UnsupportedError for an option that says nothing of an encoder, CapacityError for a max_model_len above
    the tokens of a step."""
    for name in ("speculate", "cache_file"):
        if config.changes().get(name) is not None:
            reason = "it answers nothing, and no part of a prompt's pages is of use to another"
            raise UnsupportedError(f"{name} with an encoder model", reason, ("leave it out",))
    if config.max_model_len is not None and config.max_model_len > tokens:
        what = f"max_model_len={config.max_model_len}"
        remedy = "An encoder computes a text in one step: raise max_batch_tokens or lower max_model_len."
        raise CapacityError(what, config.max_model_len, tokens, "tokens of a step", remedy)
