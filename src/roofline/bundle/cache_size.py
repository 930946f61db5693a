"""How many tokens the KV cache holds, and in which format."""

from collections.abc import Mapping
from typing import Any

from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.common.units import human_bytes
from roofline.ops.batch import PAGE_TOKENS
from roofline.ops.symbol import kv_head_bytes

DEFAULT_CACHE_TOKENS = 16384
KV_CACHE_DTYPES = ("auto", "bf16", "int8", "fp8")


def resolve_kv_dtype(asked: str) -> str:
    """The format of a KV cache in the host's memory: "auto" is "bf16".

    Raises ConfigError on a name there is not, UnsupportedError on "fp8", which some GPUs have.
    """
    if asked == "fp8":
        reason = "only GPUs convert 8-bit floats, and of them not all"
        raise UnsupportedError("an fp8 KV cache without a GPU", reason, ("kv_cache_dtype=int8", "backend=gpu"))
    if asked not in KV_CACHE_DTYPES:
        raise ConfigError(f"there is no KV cache of {asked!r}; choose one of {', '.join(KV_CACHE_DTYPES)}")
    return "bf16" if asked == "auto" else asked


def cache_size(
    settings: Mapping[str, Any], cache_tokens: int | None, max_model_len: int | None, kv_dtype: str, copies: int = 1
) -> tuple[int, int]:
    """(pages of the KV cache, longest context), as asked or as the memory allows.

    settings: the fields of the model's configuration; copies: caches that share what the memory allows.
    Raises ConfigError or CapacityError where they do not fit the model, the machine or each other.
    """
    longest = max_context(settings["max_position"], max_model_len)
    pages = _pages(settings, cache_tokens, kv_dtype, copies)
    longest = min(longest, pages * PAGE_TOKENS) if max_model_len is None else longest
    if pages * PAGE_TOKENS < longest:
        remedy = "Raise cache_tokens or lower max_model_len."
        raise CapacityError(f"a context of {longest:,} tokens", longest, pages * PAGE_TOKENS, "cache tokens", remedy)
    return pages, longest


def max_context(positions: int, wanted: int | None) -> int:
    """The longest context: as asked, or the model's own. Raises ConfigError where the model has fewer positions."""
    if wanted is None:
        return positions
    if not 1 <= wanted <= positions:
        raise ConfigError(f"max_model_len={wanted} is not between 1 and the model's {positions} positions")
    return wanted


def _pages(settings: Mapping[str, Any], wanted: int | None, kv_dtype: str, copies: int) -> int:
    """KV pages: as asked, or DEFAULT_CACHE_TOKENS within a quarter of the free memory, for all copies together."""
    from roofline.hardware.detect import detect

    token_bytes = 2 * settings["layers"] * settings["kv_heads"] * kv_head_bytes(kv_dtype, settings["head_dim"])
    free = detect().memory_available or 1 << 62
    if wanted is not None:
        if wanted < PAGE_TOKENS:
            raise ConfigError(f"cache_tokens={wanted} is less than one page of {PAGE_TOKENS}")
        if wanted * token_bytes > free:
            remedy = f"Lower cache_tokens: a token takes {human_bytes(token_bytes)}."
            raise CapacityError("the KV cache", wanted * token_bytes, free, "bytes", remedy)
        return -(-wanted // PAGE_TOKENS)
    return min(DEFAULT_CACHE_TOKENS, max(free // 4 // copies // token_bytes, PAGE_TOKENS)) // PAGE_TOKENS


def step_size(backend: str, tokens: int | None, running: int | None) -> tuple[int, int]:
    """(tokens, sequences) of the largest step; None: what keeps the backend's chips busy.

    A GPU multiplies hundreds of rows in the time of one, so a step of 512 tokens would leave it idle; on a CPU longer
    steps only make those wait that are answered beside a prompt.
    """
    default = (2048, 256) if backend == "gpu" else (512, 64)
    return tokens or default[0], running or default[1]
