"""What fits on a device, and how: everything resident, or some layers on the host, or a refusal that names what would.

Planning alone: no device is asked and nothing is allocated here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from roofline.backends.capacity import pages_within
from roofline.backends.gpu.integers import next_power_of_2
from roofline.backends.gpu.memory.requirements import Needs
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.common.units import human_bytes, human_seconds
from roofline.hardware.gpus.device import Device
from roofline.ops.batch import PAGE_TOKENS

BUFFERS = 2  # one layer computes while the next is copied
OffloadOption = int | Literal["auto"]


@dataclass(frozen=True)
class Budget:
    """What of one device, and of the machine, may be used. Bytes, and bytes/s.

    name: of the device, for messages; memory: of its own (the VRAM an APU reports); shared: of the host's memory that
    it reads as its own (an APU's GTT; 0 for a card); host: of the host's memory, beside `shared`, that layers may be
    kept in; link: from host to device, 0: unknown; bandwidth: of its memory, 0: unknown; devices: of this kind in the
    machine.
    """

    name: str
    memory: int
    shared: int = 0
    host: int = 0
    link: float = 0.0
    bandwidth: float = 0.0
    devices: int = 1

    @classmethod
    def of(
        cls, device: Device, *, free: int | None = None, host: int = 0, link: float = 0.0, devices: int = 1
    ) -> "Budget":
        """All of a device, but where `free` says less of its own memory is left (torch.cuda.mem_get_info).

        Raises UnsupportedError for a device whose memory no driver tells.
        """
        if device.memory is None or device.usable is None:
            raise UnsupportedError(f"planning for {device.title}", "nothing says how much memory it has", ("torch",))
        memory = min(device.memory, device.usable if free is None else free)
        figure = device.product.bandwidth if device.product else None
        shared = device.usable - min(device.memory, device.usable)
        return cls(
            name=device.title,
            memory=memory,
            shared=shared,
            host=host,
            link=link,
            bandwidth=figure.value if figure else 0.0,
            devices=devices,
        )

    @property
    def room(self) -> int:
        """Bytes that weights, cache and workspace may take together."""
        return self.memory + self.shared


@dataclass(frozen=True)
class Placement:
    """Where a model's bytes go.

    pages: of 16 tokens in the cache; resident: bytes of weights on the device, buffers not counted; hosted: layers on
    the host; used: bytes of the device in all; beyond: bytes of these that lie in memory it shares with the host;
    seconds: least time of a decode step on an empty cache, None: unknown.
    """

    pages: int
    resident: int
    hosted: tuple[int, ...]
    used: int
    beyond: int
    seconds: float | None


def place(
    needs: Needs,
    budget: Budget,
    *,
    least_tokens: int,
    tokens: int | None = None,
    offload: OffloadOption = 0,
    alternatives: Mapping[str, Needs] | None = None,
) -> Placement:
    """Fit a model to a device.

    Args:
        least_tokens: that the cache must hold: the longest sequence to be served.
        tokens: that the cache holds; None: what is left, at least `least_tokens`.
        offload: layers that stay on the host; "auto": as few as it takes.
        alternatives: what could be asked for instead -> its needs, for the refusal ("kv_cache_dtype=fp8", ...).

    Raises:
        CapacityError: bytes needed, bytes there, and which of the options would fit.
        ConfigError: more layers to offload than there are.
    """
    layers = len(needs.layers)
    if offload != "auto" and not 0 <= offload <= layers:
        raise ConfigError(f"offload={offload}: the model has {layers} layers")
    needed_tokens = max(least_tokens, tokens or 0)
    needed_tokens = max(1, -(-needed_tokens // PAGE_TOKENS)) * PAGE_TOKENS
    hosted = _hosted(needs, budget, needed_tokens, offload)
    if hosted is None:
        raise _refusal(needs, budget, needed_tokens, offload, alternatives or {})
    fixed, pages = _fixed(needs, hosted), needed_tokens // PAGE_TOKENS
    if tokens is None:
        pages = pages_within(budget.room - fixed, needs.token)
    used = fixed + pages * PAGE_TOKENS * needs.token
    return Placement(
        pages=pages,
        resident=needs.weights - _moved(needs, hosted),
        hosted=hosted,
        used=used,
        beyond=max(0, used - budget.memory),
        seconds=_seconds(needs, budget, hosted),
    )


def _choices(needs: Needs, budget: Budget, offload: OffloadOption) -> list[tuple[int, ...]]:
    """The layers on the host in each way that is allowed and that the host has room for, fewest first."""
    layers = len(needs.layers)
    ways = (spread(count, layers) for count in (range(layers + 1) if offload == "auto" else (offload,)))
    return [hosted for hosted in ways if _pinned(needs, hosted) <= budget.host]


def _hosted(needs: Needs, budget: Budget, tokens: int, offload: OffloadOption) -> tuple[int, ...] | None:
    """The first way that fits, None where none does."""
    room = budget.room - tokens * needs.token
    return next((hosted for hosted in _choices(needs, budget, offload) if _fixed(needs, hosted) <= room), None)


def _moved(needs: Needs, hosted: tuple[int, ...]) -> int:
    return sum(needs.layers[layer] for layer in hosted)


def _pinned(needs: Needs, hosted: tuple[int, ...]) -> int:
    """Bytes of the host's memory that hosted layers take: torch rounds each pinned block up to a power of two."""
    return sum(next_power_of_2(needs.layers[layer]) for layer in hosted)


def _fixed(needs: Needs, hosted: tuple[int, ...]) -> int:
    """Bytes on the device apart from the cache."""
    buffers = _buffers(hosted) * max((needs.layers[layer] for layer in hosted), default=0)
    return needs.weights - _moved(needs, hosted) + buffers + needs.workspace + needs.others


def _buffers(hosted: tuple[int, ...]) -> int:
    return min(BUFFERS, len(hosted))


def _seconds(needs: Needs, budget: Budget, hosted: tuple[int, ...]) -> float | None:
    """All weights read once at the device's bandwidth, copies at the link's."""
    if not budget.bandwidth or (hosted and not budget.link):
        return None
    compute = [size / budget.bandwidth for size in needs.layers]
    copies = {layer: needs.layers[layer] / budget.link for layer in hosted}
    return step_seconds(compute, copies, _buffers(hosted)) + needs.ends / budget.bandwidth


def _refusal(
    needs: Needs, budget: Budget, tokens: int, offload: OffloadOption, alternatives: Mapping[str, Needs]
) -> CapacityError:
    options = list(_options(needs, budget, tokens, offload, alternatives))
    remedy = f"What fits: {'; '.join(options)}." if options else "Nothing we have makes it fit: take a smaller model."
    ways = _choices(needs, budget, offload)
    if offload != "auto" and not ways:
        size = _pinned(needs, spread(offload, len(needs.layers)))
        return CapacityError(f"{offload} layers on the host", size, budget.host, "bytes of host memory", remedy)
    least = min(_fixed(needs, hosted) for hosted in ways) + tokens * needs.token
    parts = (
        f"weights of {human_bytes(needs.weights)}",
        f"cache of {tokens:,} tokens ({human_bytes(tokens * needs.token)})",
        f"workspace of {human_bytes(needs.workspace)}",
        *([f"what else is to lie there {human_bytes(needs.others)}"] if needs.others else []),
    )
    return CapacityError(f"{budget.name}: {', '.join(parts)}", least, budget.room, "bytes", remedy)


def _options(
    needs: Needs, budget: Budget, tokens: int, offload: OffloadOption, alternatives: Mapping[str, Needs]
) -> Iterator[str]:
    """Each single change that would make it fit, in words."""
    fixed = [_fixed(needs, hosted) for hosted in _choices(needs, budget, offload)]
    free_tokens = pages_within(budget.room - min(fixed, default=budget.room), needs.token) * PAGE_TOKENS
    if free_tokens >= PAGE_TOKENS:
        yield f"a context of at most {free_tokens:,} tokens"
    for what, other in alternatives.items():
        if _hosted(other, budget, tokens, offload) is not None:
            yield what
    if offload != "auto" and (hosted := _hosted(needs, budget, tokens, "auto")) is not None:
        seconds = _seconds(needs, budget, hosted)
        cost = "" if seconds is None else f" (at least {human_seconds(seconds)} a step)"
        yield f"offload of {len(hosted)} of {len(needs.layers)} layers to the host{cost}"
    for devices in range(2, min(budget.devices, needs.kv_heads) + 1):
        one = replace(budget, host=budget.host // devices)
        if _hosted(needs.over(devices), one, tokens, offload) is not None:
            yield f"tensor parallel over {devices} devices"
            break


def spread(count: int, layers: int) -> tuple[int, ...]:
    """`count` of `layers` layers, as evenly as possible, so that each copy has about as many layers to hide behind."""
    return tuple((2 * i + 1) * layers // (2 * count) for i in range(count))


def step_seconds(compute: Sequence[float], copies: Mapping[int, float], buffers: int) -> float:
    """Seconds from one step's end to the next one's, when step follows step: a small simulation.

    One engine copies, one computes. A copy starts when the one before it is done and its buffer's last reader is; a
    layer starts when the one before it is done and its own copy is.

    Args:
        compute: seconds of each layer.
        copies: layer -> seconds of its copy, for layers that live on the host.
        buffers: on the device, each of which holds one layer; with as many as layers on the host none is copied twice.
    """
    if not copies or len(copies) <= buffers:
        return sum(compute)
    assert buffers >= 1, "a layer is computed where it was copied to"
    now = copied = 0.0  # when the computing and the copying engine are free
    read = [0.0] * buffers  # when each buffer's last reader is done
    turn, ends = 0, []
    for _ in range(4 * buffers):  # what buffer a layer finds repeats after at most `buffers` steps
        for layer, seconds in enumerate(compute):
            ready = 0.0
            if layer in copies:
                buffer = turn % buffers
                copied = ready = max(copied, read[buffer]) + copies[layer]
                turn += 1
            now = max(now, ready) + seconds
            if layer in copies:
                read[buffer] = now
        ends.append(now)
    return (ends[-1] - ends[-1 - buffers]) / buffers
