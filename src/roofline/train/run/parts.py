"""What a run is made of, from its configuration: its part of each batch, its model, and what computes gradients."""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.train.config.schema import TrainConfig
from roofline.train.data.loader import Share
from roofline.train.model import adaptation, build
from roofline.train.model.modules import Model
from roofline.train.model.shapes import files
from roofline.train.parallel.elastic import rounds
from roofline.train.parallel.processes import World, shard
from roofline.train.run.gradients import Gradients
from roofline.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from roofline.train.run.loop import Run


def shares(config: TrainConfig, world: World) -> list[Share]:
    """The parts of each global batch that this process computes. Raises ConfigError for a tree that is none."""
    elastic, rank, count = config.elastic, world.data_rank, world.data_size
    return rounds(elastic.virtual_shards, rank, count) if elastic else [(rank, count)]


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
    gradients.keeps_padding = config.compile_config is not None or not trims
    if size == "auto" and available is not None:  # what does not fit is not tried: libraries fail in many ways
        rows = run.report.memory.rows_for(available) if world.rank == 0 else None
        gradients.size = world.share(rows)
    predicted = run.report.memory.predicted
    gradients.predicted = predicted.total if predicted is not None else None
    return gradients
