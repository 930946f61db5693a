"""The one training loop: read, compute, clip, step, record."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.common.units import parse_bytes
from roofline.models import presets
from roofline.train.checkpoint import checkpoint, state
from roofline.train.checkpoint.checkpoint import Saver
from roofline.train.config.duration import Batches, batches
from roofline.train.config.schema import TrainConfig
from roofline.train.data.loader import Loader, in_turn, open_source
from roofline.train.data.receipts import START, ReceiptLog
from roofline.train.memory.estimate import keep_freed_memory
from roofline.train.model import build
from roofline.train.model.modules import Model
from roofline.train.model.optim import optimizer
from roofline.train.parallel.elastic import check, rounds
from roofline.train.parallel.processes import World, join, leave, reshard, shard
from roofline.train.report import loggers
from roofline.train.report.log import RunLog
from roofline.train.report.summary import Report
from roofline.train.run.clip import clip
from roofline.train.run.determinism import deterministic
from roofline.train.run.gradients import Gradients, limit_memory
from roofline.train.run.probe import Probe
from roofline.train.run.schedule import schedule
from roofline.train.storage.open import open_store
from roofline.train.storage.store import Store


@dataclass
class Progress:
    """How far a run is: steps and tokens done, and the order's receipt."""

    step: int = 0
    tokens: int = 0
    receipt: str = START


@dataclass(frozen=True)
class Finished:
    """What a run came to. loss: of the last step; evaluation: the last loss on held-out text, if any was read."""

    steps: int
    loss: float
    evaluation: float | None
    folder: Path


def _due(step: int, every: int, last: bool) -> bool:
    return bool(every) and (last or step % every == 0)


def train(config: TrainConfig, watch: Callable[[JsonObject], None] | None = None) -> Finished:
    """Train as configured; in a process group where torchrun's variables say so.

    watch: called with each line of the log, on rank 0. Raises ConfigError, UnsupportedError, CapacityError.
    """
    if config.deterministic_mode or config.elastic is not None:
        deterministic()
    if config.elastic is not None:
        check(config)
        torch.set_num_threads(config.elastic.threads)
    world = join(config)
    if config.memory_limit is not None:
        limit_memory(parse_bytes("memory_limit", config.memory_limit))
    try:
        with _opened(config, world, watch) as run:
            return run.fit()
    finally:
        leave(world)


@contextmanager
def _opened(config: TrainConfig, world: World, watch: Callable[[JsonObject], None] | None) -> Iterator["Run"]:
    run = Run(config, world, watch)
    try:
        yield run
    finally:
        run.close()


class Run:
    """A run's state, built from its configuration."""

    def __init__(self, config: TrainConfig, world: World, watch: Callable[[JsonObject], None] | None = None) -> None:
        loggers.check(config.loggers)
        self.config, self.world = config, world
        self.folder = Path(config.run_folder or f"runs/{config.run_name}")
        length, apart = config.max_seq_len, config.model.attn_config.attn_uses_sequence_id
        self.source = open_source(config.train_loader, length, apart)
        self.held_out = open_source(config.eval_loader, length, apart) if config.eval_loader else None
        self.order = self.source.order(config.global_train_batch_size, config.seed)
        self._durations()
        self.shape = build.model_config(config.model, length)
        for source in (self.source, self.held_out):
            if source is not None:
                source.room = self.shape["vocab"]
        if world.device.type == "cpu":
            keep_freed_memory()
        self.report = Report(config, self.shape, world)
        self.model = self._model()
        self.optimizer = optimizer(config.optimizer, self.model, exact=config.elastic is not None)
        self.factor = schedule(config.scheduler, self.units)
        size, section = config.device_train_microbatch_size, config.fsdp_config
        # A tree of microbatches would depend on how many shards a rank has: each shard is summed before it travels.
        whole = config.elastic is not None or (section is not None and section.sharding_strategy == "SHARD_GRAD_OP")
        self.gradients = Gradients(
            self.model,
            world,
            config.precision,
            None if size == "auto" else size,
            sharded=world.grouped,
            sync_last=whole,
            tree=config.elastic is not None,
        )
        self.progress = Progress()
        torch.manual_seed(config.seed)  # nothing draws from it yet; torch itself begins anywhere
        self.log = RunLog(self.folder, world, config, watch)
        self.receipts: ReceiptLog | None = None
        self._loader: Loader | None = None
        self.probe: Probe | None = None
        self.saver = Saver(open_store(self.save_folder), config.save_num_checkpoints_to_keep, world.grouped)
        self._resume()

    def fit(self) -> Finished:
        """Train to the end; the log, receipts and checkpoints are in the folder."""
        config, loss, held = self.config, math.nan, None
        self.begin()
        if config.probes and self.progress.step < self.stop:
            self.probe = Probe(self)
            self.probe.record()
        if config.eval_first and self.held_out is not None and self.progress.step < self.stop:
            held = self.evaluate()
        while self.progress.step < self.stop:
            loss = self.step()
            last = self.progress.step == self.stop
            evaluates = self.held_out is not None and _due(self.progress.step, self.eval_every, last)
            if evaluates:
                held = self.evaluate()
            saves = _due(self.progress.step, self.save_every, last)
            if saves:
                self.save()
            if (evaluates or saves) and not last:
                self.report.write(self)
        self.saver.wait()
        self.report.write(self, done=True)
        return Finished(self.progress.step, loss, held, self.folder)

    def begin(self) -> None:
        """Open log and receipts where the run goes on, and start to read."""
        config = self.config
        self.receipts = self._receipts()
        reported = self.report.begin(self)
        self.log.open(self.progress.step, self.progress.tokens)
        self.log.about(
            step=self.progress.step,
            steps=self.whole,
            batch_tokens=config.global_train_batch_size * config.max_seq_len,
            parameters=presets.parameter_count(self.shape),
            processes=self.world.size,
            device=str(self.world.device),
            show_every=max(1, self.show_every),
            **reported,
        )
        self._loader = self._reader()

    def step(self) -> float:
        """One global batch; its mean loss."""
        assert self._loader is not None
        started = time.perf_counter()
        rows = next(self._loader)
        waited = time.perf_counter() - started
        self.optimizer.set_factor(self.factor(rows.step))
        loss_sum, tokens = self.gradients.backward(rows)
        scaler = self.gradients.scaler
        clipping = self.config.algorithms.gradient_clipping
        norm = clip(self.model, self.world, clipping, scaler.scale if scaler else 1.0, self.config.elastic is not None)
        finite, loss = math.isfinite(norm), loss_sum / max(1, tokens)
        if not finite and (scaler is None or scaler.scale <= 1):
            raise ConfigError(
                f"step {self.progress.step + 1}: the gradient is not finite (loss {loss:.4g}). Nothing was written of "
                "it: lower optimizer.lr, lengthen scheduler.t_warmup or clip gradients"
            )
        if finite:
            self.optimizer.step()
        if scaler is not None:
            scaler.settle(finite)
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += rows.ids.size * self.config.max_seq_len
        if self.receipts is not None:
            self.progress.receipt = self.receipts.add(rows.ids)
        seconds = time.perf_counter() - started
        self.report.step(seconds, waited)
        self.log.step(
            step=self.progress.step,
            tokens=self.progress.tokens,
            loss=loss,
            lr=self.optimizer.lr,
            grad_norm=norm,
            seconds=seconds,
            wait=waited,
            microbatch=self.gradients.size or 0,
            **({"loss_scale": scaler.scale} if scaler else {}),
        )
        return loss

    def save(self) -> None:
        """A checkpoint of now; it is stored while training goes on."""
        self.saver.save(self.progress.step, state.tensors(self), state.facts(self))
        if self.probe is not None:
            self.probe.record()

    def evaluate(self) -> float:
        """The mean loss on the held-out text."""
        assert self.held_out is not None
        self.model.eval()
        config, total, tokens = self.config, 0.0, 0
        started = time.perf_counter()
        with torch.no_grad():
            limit = config.eval_subset_num_batches
            batch = config.device_eval_batch_size
            for rows in in_turn(self.held_out, batch, self.world.data_rank, self.world.data_size, limit):
                lost, count = self.gradients.held_out(*rows)
                total, tokens = total + lost, tokens + count
        self.model.train()
        reshard(self.model, self.world)
        both = self.world.sum([total, tokens])
        if not both[1]:
            raise ConfigError("eval_loader holds no row")
        loss = both[0] / both[1]
        self.log.evaluation(self.progress.step, loss, int(both[1]), time.perf_counter() - started)
        return loss

    def close(self) -> None:
        """Close files and threads; a checkpoint under way is stored first."""
        with ExitStack() as all_of_them:  # also where closing one fails; the last one given is closed first
            for each in (self.source, self.held_out, self.log, self.receipts, self._loader, self.saver):
                if each is not None:
                    all_of_them.callback(each.close)

    def _durations(self) -> None:
        config = self.config
        units = Batches(config.global_train_batch_size, config.max_seq_len, len(self.source))
        self.whole = batches("max_duration", config.max_duration, units)
        if self.whole < 1:
            raise ConfigError(f"max_duration={config.max_duration} is no batch")
        self.units = Batches(units.samples, units.tokens, units.epoch, self.whole)
        self.eval_every = batches("eval_interval", config.eval_interval, self.units)
        self.save_every = batches("save_interval", config.save_interval, self.units)
        self.show_every = batches("console_log_interval", config.console_log_interval, self.units)
        stop = batches("stop_after", config.stop_after, self.units) if config.stop_after else self.whole
        self.stop = min(stop, self.whole)

    @property
    def save_folder(self) -> str:
        """Where checkpoints go."""
        given = self.config.save_folder
        return given.replace("{run_name}", self.config.run_name or "") if given else str(self.folder / "checkpoints")

    def _resume(self) -> None:
        """From load_path, or from the last checkpoint of this run's own folder where autoresume finds one."""
        config, own = self.config, open_store(self.save_folder)
        found = self.world.share(checkpoint.steps(own)) if config.autoresume or self.save_every else []
        if found and config.autoresume:
            self._load(own, found[-1])
            if self.world.rank == 0:  # a kill may have come between the last checkpoint and this
                checkpoint.keep(own, config.save_num_checkpoints_to_keep)
            return
        if found and self.save_every and not config.save_overwrite:
            raise ConfigError(
                f"{own.url} holds checkpoints up to step {found[-1]}: autoresume=true goes on from there, "
                "save_overwrite=true writes over them"
            )
        if config.load_path is not None:
            place, step = checkpoint.named(config.load_path)
            self._load(place, step if step is not None else self._newest(place), config.load_weights_only)
        self.saver.replaced = [step for step in found if step > self.progress.step]

    def _newest(self, place: Store) -> int:
        found = self.world.share(checkpoint.steps(place))
        if not found:
            raise ConfigError(f"load_path: {place.url} holds no complete checkpoint")
        return int(found[-1])

    def _load(self, place: Store, step: int, weights_only: bool = False) -> None:
        if weights_only:
            checkpoint.load(place, step, state.weights(self), self.world.grouped)
            return
        said = self.world.share(checkpoint.facts(place, step))
        self.optimizer.prepare()
        held = state.tensors(self)
        checkpoint.load(place, step, held, self.world.grouped)
        state.restore(self, said, held)

    def _model(self) -> Model:
        config, world = self.config, self.world
        vocab, room = self.source.vocab, self.shape["vocab"]
        if vocab is not None and vocab > room:
            raise ConfigError(f"the rows have ids up to {vocab - 1:,}, the model's vocabulary is {room:,}")
        model = Model(self.shape, "meta" if world.grouped else world.device, ranks=world.tensor)
        if config.model.loss_fn == "torch_crossentropy":
            model.chunk_logits = False
        build.wrap(model, config)
        if world.grouped:
            shard(model, world, config)
            model.to_empty(device=world.device)
        build.start(model, config)
        return model

    def _reader(self) -> Loader:
        world, elastic = self.world, self.config.elastic
        rank, count = world.data_rank, world.data_size
        shares = rounds(elastic.virtual_shards, rank, count) if elastic else [(rank, count)]
        return Loader(self.source, self.order, self.config.train_loader, shares, self.progress.step)

    def _receipts(self) -> ReceiptLog | None:
        """Rank 0 writes them; the others know the run folder is fine when it is done."""
        log = None
        if self.world.rank == 0:
            log = ReceiptLog(self.folder, self.order, self.progress.step, self.progress.receipt)
            described = json.dumps(self.config.model_dump(mode="json"), indent=1)
            write_atomically(self.folder / "config.json", described + "\n")
        self.world.barrier()
        return log
