"""Estimates how much memory a process of a run will use, by part, before its first step.

A dry run counts what torch keeps in a microbatch. This module adds what sharding, checkpoints and, on a CPU, the C
library need.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from roofline.common import log
from roofline.common.json_types import JsonMapping
from roofline.models import presets
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.train.config.schema import FsdpSection, TrainConfig
from roofline.train.memory.dry_run import ACTIVATIONS, GRADIENTS, LOGITS, PASSING, DryRunUsage, dry_run
from roofline.train.memory.exhausted import free_memory
from roofline.train.memory.meter import MemoryMeter
from roofline.train.model.form import ParameterForm
from roofline.train.model.modules import KEYS, Model
from roofline.train.model.optim import is_hidden_matrix
from roofline.train.model.tensor_parallel import part
from roofline.train.model.widen import PLAIN
from roofline.train.parallel.processes import COMPUTE, World

# Resident bytes for each byte in use of glibc's heap: freed blocks stay, and an aligned block does not fit into the
# hole that one of its size has left. From runs of MPT and Llama shapes with glibc 2.36: 1.4 to 1.65, where logits are
# the most up to 2.3, and 1.0 to 1.4.
HEAP, COMPILED_HEAP = 1.55, 1.3  # compiled blocks allocate fewer pieces
# What `auto` computes at a time on a CPU: from both on, larger microbatches are no faster (docs/log.md). In small
# models the cost of each op beside its products decides.
CPU_TOKENS, CPU_FLOPS = 2048, 1e11
LIBRARIES = 35 << 20  # what the first steps of torch and oneDNN leave in a process on a CPU
COMPILER = 170 << 20  # and Inductor, with what it compiled

_log = log.get("train")


@dataclass(frozen=True)
class Prediction:
    """Bytes of one process at its fullest moment, which is inside a microbatch.

    rows: of the microbatch. parts: they add up to `total`:
        parameters, gradients, optimizer: this rank's share. gathered: other ranks' parameters while blocks need them,
        and gradients on their way. activations: kept for the backward pass, with 16-bit copies of weights. logits: of a
        chunk, and gradients of the head. passing: temporary tensors. checkpoint: the copy that is being stored.
        libraries, allocator: on a CPU, the code's own memory, and freed memory that the C library keeps.
    """

    rows: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Memory:
    """The predicted and the measured memory of a run. It must be made before the model, to measure that too.

    Args:
        shape: the canonical configuration of the model. forms: of its frozen parameters, by name.

    Attributes:
        predicted: on rank 0, unless torch cannot run the model without data; else None. free: bytes that were free on
        the device before the model was made, None where nothing says it. rows: of the microbatch that is predicted.
    """

    def __init__(
        self,
        config: TrainConfig,
        shape: JsonMapping,
        world: World,
        forms: Mapping[str, ParameterForm] = MappingProxyType({}),
    ) -> None:
        self.config, self.shape, self.world, self.forms = config, shape, world, forms
        parts = config.elastic.virtual_shards // world.data_size if config.elastic is not None else 1
        rows_per_sample = config.grpo.group if config.grpo is not None else 1  # rows of each sample
        self._most_rows = -(-config.global_train_batch_size // (world.data_size * parts)) * rows_per_sample
        self._beside: dict[str, int] = {}
        size = config.device_train_microbatch_size
        self._several_parts = parts > 1
        self._usage: DryRunUsage | None = None
        self._kept_per_row: float | None = None  # bytes that a compiled block keeps for its backward pass
        self.predicted: Prediction | None = None
        self.free = free_memory(world.device)
        if size == "auto":
            size = _cpu_rows(shape, config.max_seq_len) if world.device.type == "cpu" else self._most_rows
        self.rows = min(self._most_rows, size)
        if world.rank == 0 or config.compile_config is not None:
            self.predict(self.rows)
        self._meter = MemoryMeter(world.device)

    def predict(self, rows: int) -> None:
        """Predict for microbatches of so many rows."""
        self.rows = rows
        dtype = _gathered_dtype(self.config, self.world)
        several = self._several_parts or rows < self._most_rows
        try:
            self._usage = dry_run(self.config, self.shape, self.world, dtype, rows, several, self.forms)
            if self.config.eval_loader is not None:
                evaluation = dry_run(
                    self.config, self.shape, self.world, dtype, self.config.device_eval_batch_size, None, self.forms
                )
                self._usage = max(self._usage, evaluation, key=lambda usage: sum(usage.parts.values()))
        except Exception as error:  # an op that cannot run without data may raise anything; the run itself may work
            _log.warning("memory is not predicted: %s", " ".join(str(error).split())[:300] or type(error).__name__)
            return
        self._combine(self._usage)

    def rows_for(self, available: int) -> int | None:
        """Rows of a microbatch that are predicted to fit, from halving; None if nothing is predicted, or all fit.

        What is predicted afterwards is for that many rows. Memory grows linearly with them.
        """
        rows, most = self.rows, self.predicted
        if most is None or most.total <= available or rows == 1:
            return None
        self.predict(1)
        if self.predicted is None:
            return None
        least = self.predicted.total
        per_row = max(1.0, (most.total - least) / (rows - 1))
        while rows > 1 and least + per_row * (rows - 1) > available:
            rows = (rows + 1) // 2
        self.predict(rows)
        return rows

    def add(self, name: str, size: int) -> None:
        """Count something beside training that takes so many bytes."""
        self._beside[name] = size
        if self._usage is not None and self.predicted is not None:
            self._combine(self._usage)

    def measure_compiled_block(self, model: Model) -> None:
        """Predict again from what a block of the compiled model keeps for its backward pass."""
        if self._usage is None or self.config.compile_config is None:
            return
        block_bytes = _kept_by_block(model, self._usage, self.config, self.world, self.rows)
        if block_bytes is not None:
            self._kept_per_row = block_bytes / self.rows
            self._combine(self._usage)

    def _combine(self, usage: DryRunUsage) -> None:
        if self._kept_per_row is not None:
            usage = self._compiled_usage(usage, int(self._kept_per_row * self.rows))
        parts = _parts(self.config, self.shape, self.world, usage, self.forms)
        self.predicted = Prediction(self.rows, parts | self._beside)

    def _compiled_usage(self, usage: DryRunUsage, block_bytes: int) -> DryRunUsage:
        """The usage if each block keeps `block_bytes` bytes."""
        activations = usage.first + self.shape["layers"] * block_bytes
        rest = {LOGITS: usage.most.get(LOGITS, 0), GRADIENTS: usage.parts.get(GRADIENTS, 0), PASSING: 0}
        return replace(usage, parts={ACTIVATIONS: activations, **rest})

    def peak(self) -> int | None:
        """The most bytes so far on any rank; None if the system does not tell. All ranks must call it together."""
        own = self._meter.peak()
        most = int(self.world.most([-1 if own is None else own])[0])
        return None if most < 0 else most

    def restart(self) -> None:
        """Forget the peak so far."""
        self._meter.restart()


def _cpu_rows(shape: JsonMapping, length: int) -> int:
    """Return the fewest rows that a CPU computes at its full speed; six FLOPs a parameter and token."""
    tokens = max(CPU_TOKENS, CPU_FLOPS / (6 * presets.parameter_count(shape)))
    return math.ceil(tokens / length)


@dataclass
class _Sizes:
    """Bytes of this rank's share, and as they are gathered of the last block and of what is outside of blocks."""

    parameters: int = 0
    trained: int = 0
    states: int = 0
    block: int = 0
    outer: int = 0


def _sizes(config: TrainConfig, shape: JsonMapping, world: World, forms: Mapping[str, ParameterForm]) -> _Sizes:
    """What parameters take; those that are frozen have no gradient and no state."""
    family, cfg = configure(shape)
    muon, lion = config.optimizer.name == "muon", config.optimizer.name == "decoupled_lionw"
    # The mesh is [..., shard, tensor].
    shards = int(world.mesh.mesh.shape[-2]) if world.grouped and world.mesh is not None else 1
    gathered, sizes = _gathered_dtype(config, world), _Sizes()
    for param in expand(family.spec(cfg), cfg.layers):
        if param.tied_to is not None:
            continue
        form = forms.get(param.name)
        tensors = [(part(param, world.tensor).local, torch.float32, True)]
        if form is not None:
            tensors = [(form.stored, PLAIN.get(form.format, torch.uint8), False)]
            tensors += [(shape, torch.float32, True) for shape in form.trained.values()]
        for local, dtype, trained in tensors:
            size = dtype.itemsize * -(-local[0] // shards) * math.prod(local[1:])
            sizes.parameters += size
            sizes.trained += size if trained else 0
            state_count = 1 if lion or (muon and len(local) == 2 and is_hidden_matrix(param)) else 2
            sizes.states += state_count * size if trained else 0
            width = gathered.itemsize if dtype.is_floating_point else dtype.itemsize
            if param.name.startswith(
                f"layers.{cfg.layers - 1}."
            ):  # where layers differ, the first ones are the smaller
                sizes.block += width * math.prod(local)
            elif not param.name.startswith("layers."):
                sizes.outer += width * math.prod(local)
    return sizes


def _parts(
    config: TrainConfig,
    shape: JsonMapping,
    world: World,
    usage: DryRunUsage,
    forms: Mapping[str, ParameterForm] = MappingProxyType({}),
) -> dict[str, int]:
    """The parts of a prediction that are not zero."""
    sizes = _sizes(config, shape, world, forms)
    parameters, states = sizes.parameters, sizes.states
    parts = {"parameters": parameters, "optimizer": states}
    parts |= {name: usage.parts.get(name, 0) for name in (GRADIENTS, ACTIVATIONS, LOGITS, PASSING)}
    if world.grouped:
        parts |= _sharded(config, sizes, int(shape["layers"]), _gathered_dtype(config, world))
    if world.device.type == "cpu":
        compiled = config.compile_config is not None
        parts["checkpoint"] = sizes.trained + states if config.save_interval != "0ba" else 0
        parts["libraries"] = LIBRARIES + (COMPILER if compiled else 0)
        freed = int(((COMPILED_HEAP if compiled else HEAP) - 1) * sum(usage.parts.values()))
        # Chunks of probes, steps and evaluations differ in size, so one may not fit where another was.
        parts["allocator"] = freed if compiled else max(freed, parts[LOGITS])
    return {name: size for name, size in parts.items() if size}


def _sharded(config: TrainConfig, sizes: _Sizes, layers: int, dtype: torch.dtype) -> dict[str, int]:
    """The parts that FSDP2 changes. dtype: of what is gathered.

    Two blocks are gathered at a time, one of them also in its form for the network. The gradients of a block exist as
    they are computed and, twice, as they are sent. Parameters outside of blocks stay gathered.
    """
    section = config.fsdp_config or FsdpSection()
    elastic, keeps_gathered = config.elastic, section.sharding_strategy == "SHARD_GRAD_OP"
    sent = 2 if section.mixed_precision == "PURE" and elastic is None and dtype != torch.float32 else 4
    total = sizes.outer + layers * sizes.block
    gathered = total + sizes.block if keeps_gathered else sizes.outer + 3 * sizes.block
    share = sizes.trained / max(1, sizes.parameters)  # of a block's bytes: what has gradients
    travelling = int(share * sizes.block) * (dtype.itemsize + 2 * sent) // dtype.itemsize
    gradients = 4 * int(share * total) // dtype.itemsize if keeps_gathered or elastic is not None else sizes.trained
    if elastic is not None:
        gradients *= 2 + (elastic.virtual_shards - 1).bit_length()  # subtrees of sums wait for their other halves
    return {"gathered": gathered + travelling, GRADIENTS: gradients}


def _kept_by_block(model: Model, usage: DryRunUsage, config: TrainConfig, world: World, rows: int) -> int | None:
    """Bytes that a block of a compiled model keeps for its backward pass, its result included; None if not known.

    The block is compiled and run on the shapes of a microbatch; the first step finds it compiled.
    """
    device, length, compute = world.device, config.max_seq_len, COMPUTE[config.precision]
    dtype = _gathered_dtype(config, world)
    last = model.cfg.layers - 1
    if model.cfg.kv_source(last) != last:
        return None  # it reads what another block wrote
    weights = []
    for node, name in model.blocks[last].places:
        tensor = getattr(node, name)
        kind = dtype if tensor.dtype.is_floating_point and dtype != torch.float32 else tensor.dtype
        values = torch.full(tensor.shape, 0.01, device=device).to(kind)
        weights.append(nn.Parameter(values, requires_grad=tensor.requires_grad))
    apart = config.model.attn_config.attn_uses_sequence_id
    documents = torch.zeros(rows, length, dtype=torch.int64, device=device) if apart else None
    x = torch.full((rows * length, model.cfg.width), 0.01, dtype=usage.stream, device=device, requires_grad=True)
    first = model.kinds[last]
    shared = model.shared(rows, length, device, documents, first)
    with torch.autocast(device.type, compute, enabled=compute is not None):
        out = model.compute((rows, length, first), x, *shared, *(None,) * KEYS, *weights)
    if not isinstance(out, Tensor):
        return None  # others read what it wrote
    saved = getattr(out.grad_fn, "saved_tensors", None)
    if saved is None:
        return None  # a backend that leaves the graph to torch
    inputs = {tensor.untyped_storage()._cdata for tensor in (x, *shared, *weights) if tensor is not None}
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (out, *saved) if isinstance(t, Tensor)}
    return sum(size for key, size in sizes.items() if key not in inputs)


def _gathered_dtype(config: TrainConfig, world: World) -> torch.dtype:
    """The type of parameters while a block computes."""
    section = config.fsdp_config or FsdpSection()
    narrow = COMPUTE[config.precision] if world.grouped and section.mixed_precision != "FULL" else None
    return narrow or torch.float32
