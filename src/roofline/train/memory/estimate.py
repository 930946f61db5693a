"""How much memory a process of a run will take, by part, before its first step; and how much it took.

What torch keeps in a microbatch is rehearsed (train.rehearsal); what sharding, checkpoints and, on a CPU, the C library
add to it is worked out here.
"""

import ctypes
import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from roofline.common import log
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.train.config.schema import FsdpSection, TrainConfig
from roofline.train.memory.dry_run import ACTIVATIONS, GRADIENTS, LOGITS, PASSING, Rehearsed, rehearse
from roofline.train.model.modules import Model, chunk_rows
from roofline.train.model.optim import is_hidden_matrix
from roofline.train.model.tensor_parallel import part
from roofline.train.parallel.processes import COMPUTE, World

# Resident bytes for each one in use of glibc's heap: freed blocks stay, and an aligned block does not fit into the hole
# that one of its size has left. From runs of MPT and Llama shapes with glibc 2.36: 1.5 to 1.85, and 1.0 to 1.4.
HEAP, COMPILED_HEAP = 1.6, 1.3  # compiled blocks ask for fewer pieces
LIBRARIES = 35 << 20  # what the first steps of torch and oneDNN leave in a process on a CPU
COMPILER = 170 << 20  # and Inductor, with what it compiled

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h

_log = log.get("train")


@dataclass(frozen=True)
class Prediction:
    """Bytes of one process where its memory is fullest, which is inside a microbatch.

    parts: they add up to total. parameters, gradients, optimizer: this rank's share of them; gathered: parameters of
    other ranks while blocks need them, and gradients on their way; activations: kept for the backward pass, weights in
    16 bits among them; logits: of a chunk, and gradients of the head; passing: what comes and goes; checkpoint: the
    copy that is being stored; libraries, allocator: of a CPU process, code's own, and what the C library keeps of
    freed memory. rows: of the microbatch.
    """

    rows: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Held:
    """What a rank has all along: bytes of its parameters; elements of a whole block, and of what is in none."""

    sizes: list[int]
    optimizer: list[int]
    block: int
    rest: int
    layers: int


class Memory:
    """What a run is predicted to take, and takes.

    Args:
        shape: the canonical configuration of a model that is not made yet, so that what is there is not counted.

    Attributes:
        predicted: on rank 0; None: elsewhere, or where torch cannot rehearse it.
    """

    def __init__(self, config: TrainConfig, shape: JsonMapping, world: World) -> None:
        self.config, self.shape, self.world = config, shape, world
        parts = config.elastic.virtual_shards // world.data_size if config.elastic is not None else 1
        self._most = max(1, -(-config.global_train_batch_size // (world.data_size * parts)))
        asked = config.device_train_microbatch_size
        self.rows = self._most if asked == "auto" else min(self._most, asked)
        self._several = parts > 1
        self._found: Rehearsed | None = None
        self._kept: float | None = None  # by a compiled block, of each row
        self.predicted: Prediction | None = None
        if world.rank == 0 or config.compile_config is not None:
            self.rehearse(self.rows)
        self._meter = Meter(world.device)

    def rehearse(self, rows: int) -> None:
        """Predict for microbatches of so many rows."""
        self.rows = rows
        dtype = _gathered_as(self.config, self.world)
        several = self._several or rows < self._most
        try:
            self._found = rehearse(self.config, self.shape, self.world, dtype, rows, several)
        except Exception as error:  # whatever an op that torch cannot run without data raises: the run itself may go
            _log.warning("memory is not predicted: %s", " ".join(str(error).split())[:300] or type(error).__name__)
            return
        self._predict()

    def _predict(self) -> None:
        """From what was rehearsed, and what is known of compiled blocks."""
        found = self._found
        assert found is not None
        if self._kept is not None:
            found = _compiled(found, self.shape["layers"], int(self._kept * self.rows), self._logits())
        self.predicted = Prediction(self.rows, _parts(self.config, self.shape, self.world, found))

    def halved(self, rows: int) -> None:
        """Predict anew where `auto` has come down to microbatches of so many rows."""
        if rows < self.rows:
            self.rehearse(rows)

    def compiled(self, model: Model) -> None:
        """Look at what a block keeps after compilation."""
        if self._found is None or self.config.compile_config is None:
            return
        kept = kept_by_block(model, self._found, self.config, self.world, self.rows)
        if kept is not None:
            self._kept = kept / self.rows
            self._predict()

    def _logits(self) -> tuple[int, int]:
        """Elements of logits that are held at a time, and bytes of each in a compiled head."""
        vocab, rows = self.shape["vocab"], self.rows * self.config.max_seq_len
        chunked = self.config.model.loss_fn != "torch_crossentropy"
        compute = COMPUTE[self.config.precision] or torch.float32
        return vocab * (min(rows, chunk_rows(vocab)) if chunked else rows), compute.itemsize

    def peak(self) -> int | None:
        """The most bytes so far on any rank; None where the system does not say. All ranks ask together."""
        mine = self._meter.peak()
        most = int(self.world.most([-1 if mine is None else mine])[0])
        return None if most < 0 else most

    def restart(self) -> None:
        """Forget the peak so far."""
        self._meter.restart()


def _parts(config: TrainConfig, shape: JsonMapping, world: World, found: Rehearsed) -> dict[str, int]:
    held = _held(config, shape, world)
    parts = {
        "parameters": sum(held.sizes),
        "optimizer": sum(held.optimizer),
        **{name: found.parts.get(name, 0) for name in (GRADIENTS, ACTIVATIONS, LOGITS, PASSING)},
    }
    if world.grouped:
        parts |= _sharded(config, held, _gathered_as(config, world))
    if world.device.type == "cpu":
        stored = config.save_interval not in ("0ba", "0")
        parts["checkpoint"] = sum(held.sizes) + sum(held.optimizer) if stored else 0
        parts["libraries"] = LIBRARIES + (COMPILER if config.compile_config is not None else 0)
        factor = HEAP if config.compile_config is None else COMPILED_HEAP
        parts["allocator"] = int((factor - 1) * sum(found.parts.values()))
    return {name: size for name, size in parts.items() if size}


def _held(config: TrainConfig, shape: JsonMapping, world: World) -> _Held:
    family, cfg = configure(shape)
    shards, muon = _shards(config, world), config.optimizer.name == "muon"
    sizes, states, block, rest = [], [], 0, 0
    for param in expand(family.spec(cfg), cfg.layers):
        if param.tied_to is not None:
            continue
        local = part(param, world.tensor).local
        size = 4 * -(-local[0] // shards) * math.prod(local[1:])
        sizes.append(size)
        states.append(size if muon and is_hidden_matrix(param) else 2 * size)
        if param.name.startswith("layers.0."):
            block += math.prod(local)
        elif not param.name.startswith("layers."):
            rest += math.prod(local)
    return _Held(sizes, states, block, rest, cfg.layers)


def _sharded(config: TrainConfig, held: _Held, dtype: torch.dtype) -> dict[str, int]:
    """What FSDP2 holds: the parts that are not as a rehearsal on one process has them.

    Two blocks are whole at a time, one of them also as it came over the wire; a block's gradients are there as they are
    computed and, twice, as they travel. What is in no block stays whole.
    """
    section = config.fsdp_config or FsdpSection()
    wide = 2 if section.mixed_precision == "PURE" and config.elastic is None and dtype != torch.float32 else 4
    whole = held.rest + held.layers * held.block
    kept = section.sharding_strategy == "SHARD_GRAD_OP" or config.elastic is not None
    gathered = whole + held.block if section.sharding_strategy == "SHARD_GRAD_OP" else held.rest + 3 * held.block
    travelling = held.block * (dtype.itemsize + 2 * wide)
    gradients = 4 * whole if kept else sum(held.sizes)
    if config.elastic is not None:
        gradients *= 2 + (config.elastic.virtual_shards - 1).bit_length()  # a tree of sums waits for its other halves
    return {"gathered": gathered * dtype.itemsize + travelling, GRADIENTS: gradients}


def _compiled(found: Rehearsed, layers: int, kept: int, logits: tuple[int, int]) -> Rehearsed:
    """The same where each block keeps `kept` bytes, and logits become their own gradients; where it is fullest then.

    logits: elements and bytes of each; not compiled there are three of each, in float32.
    """
    count, each = logits
    activations = found.first + layers * kept
    rest = max(0, found.most.get(LOGITS, 0) - 3 * 4 * count)
    gradients = found.parts.get(GRADIENTS, 0)
    parts = {ACTIVATIONS: activations, LOGITS: rest + each * count, GRADIENTS: gradients, PASSING: 0}
    return replace(found, parts=parts)


def kept_by_block(model: Model, found: Rehearsed, config: TrainConfig, world: World, rows: int) -> int | None:
    """Bytes that a block of a compiled model keeps for its backward pass, its result among them; None: not known.

    The block is compiled and run, on the shapes of a microbatch: the first step finds it compiled.
    """
    device, length, compute = world.device, config.max_seq_len, COMPUTE[config.precision]
    made: JsonObject = {"device": device, "dtype": _gathered_as(config, world)}
    layered = [param for param in model.family.spec(model.cfg) if param.name.startswith("layers.{layer}.")]
    weights = [nn.Parameter(torch.full(part(param, world.tensor).local, 0.01, **made)) for param in layered]
    apart = config.model.attn_config.attn_uses_sequence_id
    documents = torch.zeros(rows, length, dtype=torch.int64, device=device) if apart else None
    x = torch.full((rows * length, model.cfg.width), 0.01, dtype=found.stream, device=device, requires_grad=True)
    shared = model.shared(rows, length, device, documents)
    with torch.autocast(device.type, compute, enabled=compute is not None):
        out = model.compute((rows, length), x, *shared, *weights)
    saved = getattr(out.grad_fn, "saved_tensors", None)
    if saved is None:
        return None  # a backend that leaves the graph to torch
    given = {tensor.untyped_storage()._cdata for tensor in (x, *shared, *weights) if tensor is not None}
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (out, *saved) if isinstance(t, Tensor)}
    return sum(size for key, size in sizes.items() if key not in given)


def _gathered_as(config: TrainConfig, world: World) -> torch.dtype:
    """What parameters are while a block computes."""
    section = config.fsdp_config or FsdpSection()
    narrow = COMPUTE[config.precision] if world.grouped and section.mixed_precision != "FULL" else None
    return narrow or torch.float32


def _shards(config: TrainConfig, world: World) -> int:
    """Ranks that share one copy of the parameters."""
    if not world.grouped:
        return 1
    names, sizes = world.mesh.mesh_dim_names, world.mesh.mesh.shape
    return int(sizes[names.index("shard")])


class Meter:
    """The peak memory of this process above what it has when this is made: of its accelerator, or on a CPU resident.

    On a CPU pages of files are left out: shards that are mapped, and code.
    """

    def __init__(self, device: torch.device) -> None:
        import torch._dynamo  # noqa: F401  # the first optimizer step imports it, and it is large

        self.device = device
        self._before = self._known = 0
        if device.type == "cpu":
            _trim()
            self._before = _status().get("RssAnon", 0)
        self.restart()

    def restart(self) -> None:
        """Forget the peak so far."""
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        found = _status()
        # Kernels without this, and sandboxes that only swallow it: until the old peak is passed the new one is unknown.
        kept = found.get("VmHWM", 0) > found.get("VmRSS", 0) + (4 << 20)
        self._known = found["VmHWM"] if kept else 0

    def peak(self) -> int | None:
        """Bytes; None where the system does not say, or does not forget: until an earlier peak is passed."""
        if self.device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated())
        found = _status()
        if "VmHWM" not in found or "RssFile" not in found or found["VmHWM"] <= self._known:
            return None
        return found["VmHWM"] - found["RssFile"] - self._before


def keep_freed_memory() -> None:
    """From here on memory of this process that is freed on a CPU stays with it, for what comes next.

    The C library would give large blocks back to the system at once and take them anew, zeroed page by page, at each
    step: a tenth to a fifth of a step's time. Nothing where the C library has no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _status() -> dict[str, int]:
    """Sizes in /proc/self/status, in bytes; none where there is no such file."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}


def _trim() -> None:
    """Give freed memory back, where the C library can: an earlier run of this process has left some."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
