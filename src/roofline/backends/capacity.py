"""How large a loaded model may become: the largest step, the longest context, the pages of the KV cache."""

from dataclasses import dataclass
from typing import NamedTuple

from roofline.backends.options import LoadOptions
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.common.json_types import JsonMapping
from roofline.common.units import human_bytes
from roofline.ops.batch import PAGE_TOKENS, BatchLimits
from roofline.ops.symbol import kv_head_bytes

DEFAULT_CACHE_TOKENS = 16384
HOST_KV_DTYPES = ("auto", "bf16", "int8")
# Logit rows for drafted tokens: with more sequences than these serve, a step is busy without drafts.
MAX_DRAFT_ROWS = 64
HOST_HEAD_UNIT = 16  # elements: of a head in the cache
HOST_STEP = (512, 64)  # tokens and sequences of the largest step: on a CPU longer ones only make other requests wait
SPARE_SLOTS = 2  # slots of recurrent state that there are at least beside those of a step's sequences, for snapshots
# Fields of configurations whose layers keep recurrent state, or keys of several shapes or for several layers: their
# classes, which say how much, take a part of a tenth of a second to import, so no others are asked.
BY_LAYER = ("recurrent", "window_kv_heads", "latent", "global_head_dim", "sharing_layers")


class CacheSize(NamedTuple):
    """A group of the cache: so many layers write keys of so many heads, and values (`models.config.KvShape`)."""

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class Capacity:
    """limits: the largest step; max_context: positions served; num_pages: of the KV cache, 16 tokens each, where 0
    leaves their number to a device whose free memory is known only when the model is loaded there."""

    limits: BatchLimits
    max_context: int
    num_pages: int


def batch_limits(
    options: LoadOptions, max_context: int, default_step: tuple[int, int], state_slots: int = 0
) -> BatchLimits:
    """The largest step. default_step: (tokens, sequences) that keep the backend busy, where the options say nothing."""
    tokens, running = options.max_batch_tokens or default_step[0], options.max_running or default_step[1]
    return BatchLimits(
        tokens=max(tokens, running),
        segments=running,
        rows=running + min(running * options.draft_tokens, MAX_DRAFT_ROWS),
        pages=running * -(-max_context // PAGE_TOKENS),
        state_slots=state_slots,
    )


def max_context(options: LoadOptions, positions: int) -> int:
    """The longest context: max_model_len, or all positions of the model. Raises ConfigError where it has fewer."""
    length = options.max_model_len
    if length is not None and not 1 <= length <= positions:
        raise ConfigError(f"max_model_len={length} is not between 1 and the model's {positions} positions")
    return length or positions


def host_capacity(options: LoadOptions, config: JsonMapping, kv_dtype: str, replicas: int = 1) -> Capacity:
    """The capacity of a model in the host's memory: as the options say, or as the memory allows.

    config: fields of the model's ModelConfig; kv_dtype: format of the cache; replicas: caches that share what the
    memory allows. Raises ConfigError or CapacityError where they do not fit the model, the machine or each other.
    """
    longest = max_context(options, config["max_position"])
    groups, slot_bytes = stores_of(config)
    token_bytes = sum(layers * host_token_bytes(kv_dtype, *sizes) for layers, *sizes in groups)
    if options.guesses:
        token_bytes += host_token_bytes(kv_dtype, config["kv_heads"], config["head_dim"]) + guess_bytes(config)
    pages = _host_pages(options.cache_tokens, token_bytes, replicas)
    if options.max_model_len is None:
        longest = min(longest, pages * PAGE_TOKENS)
    if pages * PAGE_TOKENS < longest:
        remedy = "Raise cache_tokens or lower max_model_len."
        raise CapacityError(f"a context of {longest:,} tokens", longest, pages * PAGE_TOKENS, "cache tokens", remedy)
    slots = _host_slots(options, slot_bytes, pages * PAGE_TOKENS * token_bytes, replicas) if slot_bytes else 0
    return Capacity(batch_limits(options, longest, HOST_STEP, slots), longest, pages)


def guess_bytes(config: JsonMapping) -> int:
    """Bytes of a token that a layer that guesses needs beside keys and values: of each page a hidden row is kept."""
    return -(-4 * config["width"] // PAGE_TOKENS)


def stores_of(config: JsonMapping) -> tuple[tuple[CacheSize, ...], int]:
    """The groups of a model's cache, and bytes of a slot: the recurrent state of one sequence.

    config: fields of its ModelConfig.
    """
    if not any(name in config for name in BY_LAYER):
        return (CacheSize(config["layers"], config["kv_heads"], config["head_dim"], 0),), 0
    from roofline.models import registry
    from roofline.program.ir import StateGroup

    model = registry.config_of(config)
    layers = range(model.layers)
    state = StateGroup(sum(map(model.keeps_state, layers)), model.state_parts)
    writers = [model.kv_shape(layer) for layer in layers if model.attends(layer)]
    return tuple(CacheSize(writers.count(shape), *shape) for shape in dict.fromkeys(writers)), state.slot_bytes


def default_slots(cache_bytes: int, slot_bytes: int, running: int) -> int:
    """Slots of recurrent state that a load takes where nobody says how many: as many bytes as the pages have, and more
    than there are sequences in a step."""
    return max(cache_bytes // slot_bytes, running + SPARE_SLOTS)


def device_slots(running: int) -> int:
    """The same on a device whose pages are counted later: a quarter more than sequences in a step, for snapshots."""
    return running + running // 4 + SPARE_SLOTS


def pages_within(room: int, token_bytes: int) -> int:
    """Pages that so many bytes hold; where no layer writes keys and values, pages take no bytes and are as many as
    DEFAULT_CACHE_TOKENS need."""
    if token_bytes == 0:
        return DEFAULT_CACHE_TOKENS // PAGE_TOKENS if room >= 0 else 0
    return max(0, room) // (token_bytes * PAGE_TOKENS)


def _host_slots(options: LoadOptions, slot_bytes: int, cache_bytes: int, replicas: int) -> int:
    """Slots of recurrent state. Raises ConfigError or CapacityError where they are too few or too many for a replica's
    share of the memory."""
    from roofline.hardware.detect import detect

    running = options.max_running or HOST_STEP[1]
    free = (detect().memory_available or 1 << 62) // replicas
    if cache_bytes == 0:  # prefixes are found by their states alone
        cache_bytes = min(free // 4, 4 * running * slot_bytes)
    slots = chosen_slots(options, running, default_slots(cache_bytes, slot_bytes, running))
    if slots * slot_bytes > free:
        remedy = f"Lower max_running or state_slots: a slot takes {human_bytes(slot_bytes)}."
        raise CapacityError("recurrent state", slots * slot_bytes, free, "bytes", remedy)
    return slots


def chosen_slots(options: LoadOptions, running: int, default: int) -> int:
    """Slots of recurrent state for so many running sequences: as the options say, else `default`. Raises ConfigError
    where they are too few."""
    slots = options.state_slots or default
    if slots < running:
        remedy = f"lower max_running, which is {running}, or raise state_slots"
        raise ConfigError(f"state_slots={slots} is not enough: each answer in the making has a slot; {remedy}")
    return slots


def _host_pages(tokens: int | None, token_bytes: int, replicas: int) -> int:
    """KV pages for so many tokens; None: DEFAULT_CACHE_TOKENS within a quarter of the free memory for all replicas."""
    from roofline.hardware.detect import detect

    free = detect().memory_available or 1 << 62
    if tokens is None:
        return min(DEFAULT_CACHE_TOKENS // PAGE_TOKENS, max(pages_within(free // 4 // replicas, token_bytes), 1))
    if tokens < PAGE_TOKENS:
        raise ConfigError(f"cache_tokens={tokens} is less than one page of {PAGE_TOKENS}")
    if tokens * token_bytes > free:
        remedy = f"Lower cache_tokens: a token takes {human_bytes(token_bytes)}."
        raise CapacityError("the KV cache", tokens * token_bytes, free, "bytes", remedy)
    return -(-tokens // PAGE_TOKENS)


def host_token_bytes(kv_dtype: str, kv_heads: int, head_dim: int, value_dim: int = 0) -> int:
    """Bytes that K and V of one token and layer take in the host's memory, where heads are filled up with zeros."""
    tensors = 1 if value_dim else 2
    return tensors * kv_heads * kv_head_bytes(kv_dtype, -(-head_dim // HOST_HEAD_UNIT) * HOST_HEAD_UNIT)


def host_kv_dtype(name: str) -> str:
    """The format of a KV cache in the host's memory: "auto" is "bf16".

    Raises UnsupportedError for "fp8", which some GPUs have, ConfigError for other formats.
    """
    if name == "fp8":
        reason = "only GPUs convert 8-bit floats, and of them not all"
        raise UnsupportedError("an fp8 KV cache without a GPU", reason, ("kv_cache_dtype=int8", "backend=gpu"))
    if name not in HOST_KV_DTYPES:
        raise ConfigError(f"there is no KV cache of {name!r}; choose one of {', '.join(HOST_KV_DTYPES)}")
    return "bf16" if name == "auto" else name
