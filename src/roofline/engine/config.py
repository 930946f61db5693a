"""The engine's own settings, and their resolution against what the executable can hold."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from roofline.common.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from roofline.backends.base import Executable


MAX_DRAFT = 15
CHOICES = {"scheduler": ("continuous", "naive"), "cache": ("paged", "naive"), "speculate": ("off", "ngram", "draft")}


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine, checked at construction.

    Args:
        max_batch_tokens: most tokens in a step; decodes come first, prompt chunks take what is left. None: as many as
            the executable was loaded for.
        max_running: most sequences that hold pages at the same time; None likewise.
        prefix_cache: reuse full pages of equal prefixes.
        max_model_len: longest prompt plus answer in tokens; None takes what the model and the cache allow.
        scheduler: "continuous", or "naive": one sequence at a time, its prompt in as few steps as the batch allows.
        cache: "paged", or "naive": nothing is ever shared.
        overlap: schedule a step while a device computes the one before; where the backend cannot queue steps, where
            drafts are made, and with the naive scheduler, one step ends before the next begins.
        measure: price each step, so that stats tell the share of the roof.
        speculate: "off", "ngram" (guess from the text itself) or "draft" (guess with a second, smaller model); the
            output is the same, bit for bit.
        speculate_tokens: longest draft, 1 to 15 tokens.
        speculate_always: draft also where measured times and acceptance promise a loss.

    Raises:
        ConfigError: the message names the field.
    """

    max_batch_tokens: int | None = None
    max_running: int | None = None
    prefix_cache: bool = True
    max_model_len: int | None = None
    scheduler: Literal["continuous", "naive"] = "continuous"
    cache: Literal["paged", "naive"] = "paged"
    overlap: bool = True
    measure: bool = True
    speculate: Literal["off", "ngram", "draft"] = "off"
    speculate_tokens: int = 4
    speculate_always: bool = False

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running", "max_model_len", "speculate_tokens"):
            value = getattr(self, name)
            if name != "speculate_tokens" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} is not a whole number of at least 1")
        if self.speculate_tokens > MAX_DRAFT:
            raise ConfigError(f"speculate_tokens={self.speculate_tokens} is more than {MAX_DRAFT}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")


@dataclass(frozen=True)
class StepLimits:
    """What one step may hold: query tokens, sequences, logit rows, page-table entries; and the longest sequence in
    tokens."""

    tokens: int
    sequences: int
    rows: int
    table_pages: int
    max_model_len: int


def resolve(config: EngineConfig, executable: "Executable") -> StepLimits:
    """Fit the settings to the executable.

    Raises:
        ConfigError: max_model_len is more than the model's positions.
        CapacityError: a sequence of max_model_len cannot lie in the cache.
    """
    from roofline.ops.batch import PAGE_TOKENS  # here: a server spawns its engine process before it imports numpy

    limits = executable.limits
    pages = min(executable.num_pages, limits.pages)
    longest = min(executable.max_context, pages * PAGE_TOKENS)
    wanted = config.max_model_len
    if wanted is not None and wanted > executable.max_context:
        raise ConfigError(f"max_model_len={wanted} is more than the {executable.max_context} positions of the model")
    if wanted is not None and wanted > longest:
        raise CapacityError(
            f"max_model_len={wanted}", wanted, longest, "tokens of cache", "Enlarge the cache or lower max_model_len."
        )
    tokens = min(config.max_batch_tokens or limits.tokens, limits.tokens)
    if config.scheduler == "naive":
        tokens = limits.tokens
    return StepLimits(
        tokens=tokens,
        # Every running sequence may decode in the same step, so the step must hold them all.
        sequences=min(config.max_running or limits.segments, limits.segments, limits.rows, tokens),
        rows=limits.rows,
        table_pages=limits.pages,
        max_model_len=min(wanted or longest, longest),
    )
