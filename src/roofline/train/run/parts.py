"""What a run is made of, from its configuration: its part of each batch, its model, and what computes gradients."""

import hashlib
import json
import re
from typing import TYPE_CHECKING

import numpy as np

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.train.config.duration import DurationUnits, batches, parse
from roofline.train.config.flatten import flatten
from roofline.train.config.schema import TrainConfig
from roofline.train.data.loader import Share, Source
from roofline.train.data.order import Order
from roofline.train.data.row_arrays import RowArrays
from roofline.train.data.row_digest import row_digest, row_sums
from roofline.train.data.synthetic import Synthetic
from roofline.train.model import adaptation, build
from roofline.train.model.modules import Model
from roofline.train.model.shapes import files
from roofline.train.parallel.elastic import rounds
from roofline.train.parallel.processes import World, shard
from roofline.train.run.gradients import Gradients
from roofline.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

COMPARED_ROWS, COMPARED_BYTES = 8, 4096  # of a data set, and of each tensor of a model's files
_log = log.get("train")
_MOST_ADDED = 200_000  # steps whose tokens are added up; of longer runs the mean tells as much
_IN_TOKENS = re.compile(r"[0-9][0-9.eE]*tok")


def shares(config: TrainConfig, world: World) -> list[Share]:
    """The parts of each global batch that this process computes. Raises ConfigError for a tree that is none."""
    elastic, rank, count = config.elastic, world.data_rank, world.data_size
    return rounds(elastic.virtual_shards, rank, count) if elastic else [(rank, count)]


def units_of(config: TrainConfig, source: Source | Synthetic) -> DurationUnits:
    """What turns durations into steps. A sample's tokens are counted where a duration is given in them, without
    padding, as LLM Foundry counts. Raises ConfigError where they cannot be."""
    values = (value for _, value in flatten(config.model_dump(mode="json")))
    needed = any(isinstance(value, str) and _IN_TOKENS.fullmatch(value.strip()) for value in values)
    tokens = source.tokens if needed else config.max_seq_len
    return DurationUnits(config.global_train_batch_size, tokens, source.epoch)


def steps_of(config: TrainConfig, units: DurationUnits, source: Source | Synthetic, order: Order) -> int:
    """The steps of a run. Of max_duration in tokens so many that their batches have as many, as LLM Foundry counts."""
    estimate = batches("max_duration", config.max_duration, units)  # by the mean
    count, unit = parse(config.max_duration)
    if unit != "tok" or not isinstance(source, Source) or not source.trained or estimate > _MOST_ADDED:
        return estimate
    step, missing = 0, count
    while missing > 0:
        numbers = order.batch(step)
        missing -= int(source.lengths[numbers[numbers >= 0]].sum())
        step += 1
    return step


def inputs_of(run: "Run") -> JsonObject:
    """What the run reads, in few words, for the comparison among its ranks: other rows, files or steps have others."""
    inputs: JsonObject = {f"the model's {key}": value for key, value in run.shape.items()}
    first = run.order.batch(0)[:COMPARED_ROWS]
    inputs["the data set of train_loader"] = _described(run.source, run.order, first)
    for label, source in run.held_out.items():
        # Rows of an evaluation that lie elsewhere are not fetched before they are needed.
        first = np.arange(0 if source.remote else min(len(source), COMPARED_ROWS))
        order = source.order(1, 0) if len(source) else None
        inputs[f"the data set of eval_loader ({label})"] = _described(source, order, first)
    if run.config.model.loads_weights:
        inputs["a hash of the model's files"] = _files_digest(run.config)
    return inputs | {"the number of steps": run.total}


def _described(source: Source | Synthetic, order: Order | None, first: np.ndarray) -> str:
    """A data set in words. order: None if it is empty. first: numbers of samples that are read."""
    index = hashlib.sha256(json.dumps(order and order.record()).encode()).hexdigest()
    rows = source.rows(first)
    rows_hash = row_digest(row_sums(RowArrays(rows.tokens, trained=rows.trained), first).tolist()).hex()
    return f"{len(source):,} samples (index {index[:8]}, first rows {rows_hash[:8]})"


def _files_digest(config: TrainConfig) -> str:
    """A hash of the names, forms and first bytes of the tensors of a model's files."""
    checkpoint, digest = open_checkpoint(files(config.model)), hashlib.sha256()
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(
            f"{name} {info.format} {info.shape}\n".encode() + checkpoint.read(name)[:COMPARED_BYTES].tobytes()
        )
    return digest.hexdigest()[:8]


def warn_of_missing_hashes(run: "Run") -> None:
    """Log once what an index of shards without hashes means, for each such data set."""
    sources = [source for source in (run.source, *run.held_out.values()) if isinstance(source, Source)]
    for text in dict.fromkeys(text for source in sources for text in source.unhashed):
        if run.world.rank == 0:
            _log.warning("%s", text)


def base_digest(config: TrainConfig) -> str:
    """Of the model's files, which an adapter belongs to."""
    return adaptation.digest(open_checkpoint(files(config.model)))


def model_of(run: "Run") -> Model:
    """The model with the values that it begins with, divided among processes.

    Raises ConfigError where it is made for the run and the rows' tokenizer has ids that it does not have. Of a model
    that comes with weights, ids are checked as the rows come.
    """
    config, world = run.config, run.world
    vocab, limit = run.source.vocab, run.shape["vocab"]
    if vocab is not None and vocab > limit and not config.model.loads_weights:
        raise ConfigError(f"the rows have ids up to {vocab - 1:,}, the model's vocabulary is {limit:,}")
    model = Model(run.shape, "meta" if world.grouped else world.device, ranks=world.tensor, forms=run.forms)
    model.chunk_logits = config.model.loss_fn != "torch_crossentropy"
    model.restarts = run.tunes
    build.wrap(model, config)
    if world.grouped:
        shard(model, world, config)
        model.to_empty(device=world.device)
    build.start(model, config)
    return model


def gradients_of(run: "Run", available: int | None) -> Gradients:
    """What computes gradients of the run's model; available: bytes that the run may take, if they are known."""
    config, world = run.config, run.world
    elastic, section, size = config.elastic is not None, config.fsdp_config, config.device_train_microbatch_size
    gradients = Gradients(
        run.model,
        world,
        config.precision,
        None if size == "auto" else size,
        # The microbatches that a rank has must not change an elastic run's sums: it adds up a shard, then sends it.
        sync_last=elastic or (section is not None and section.sharding_strategy == "SHARD_GRAD_OP"),
        tree=elastic,
    )
    trims = config.train_loader.dataset.allow_pad_trimming
    gradients.is_compiled = config.compile_config is not None
    gradients.keeps_padding = gradients.is_compiled or not trims
    if size == "auto":  # what does not fit is not tried: libraries fail in many ways
        # Rank 0 decides, and all take part: hosts may have limits of their own, or none.
        memory = run.report.memory
        fitting = memory.rows_for(available) if available is not None and world.rank == 0 else None
        gradients.size = world.share(fitting) or (memory.rows if world.device.type == "cpu" else None)
    predicted = run.report.memory.predicted
    gradients.predicted = predicted.total if predicted is not None else None
    return gradients
