"""The training loop: read a batch, compute its gradients, clip them, step the optimizer, record the step."""

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.common.units import parse_bytes
from roofline.models import presets
from roofline.train.checkpoint import state
from roofline.train.checkpoint.checkpoint import Saver
from roofline.train.checkpoint.resume import resume
from roofline.train.config.duration import Batches, batches
from roofline.train.config.schema import TrainConfig
from roofline.train.data.loader import Loader, in_turn, open_source
from roofline.train.data.receipts import START, ReceiptLog
from roofline.train.memory.meter import keep_freed_memory
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
from roofline.train.run_folder import CONFIG
from roofline.train.storage.open import open_store


@dataclass
class Progress:
    """How far a run is: the steps and tokens it has done, and its order receipt."""

    step: int = 0
    tokens: int = 0
    receipt: str = START


@dataclass(frozen=True)
class Finished:
    """The result of a run. loss: of the last step; evaluation: the last held-out loss, if one was computed."""

    steps: int
    loss: float
    evaluation: float | None
    folder: Path


Watch = Callable[[JsonObject], None]


def train(config: TrainConfig, watch: Watch | None = None) -> Finished:
    """Train as configured, in a process group if torchrun's environment variables are set.

    watch: on rank 0, called with each line of the log. Raises ConfigError, UnsupportedError, CapacityError.
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
        with closing(Run(config, world, watch)) as run:
            return run.fit()
    finally:
        leave(world)


class Run:
    """A run's state, built from its configuration and, if it continues, from a checkpoint."""

    def __init__(self, config: TrainConfig, world: World, watch: Watch | None = None) -> None:
        loggers.check(config.loggers)
        self.config, self.world = config, world
        self.folder = Path(config.run_folder or f"runs/{config.run_name}")
        length, apart = config.max_seq_len, config.model.attn_config.attn_uses_sequence_id
        self.source = open_source(config.train_loader, length, apart)
        self.held_out = open_source(config.eval_loader, length, apart) if config.eval_loader else None
        self.order = self.source.order(config.global_train_batch_size, config.seed)
        self._durations()
        self.shape = build.model_config(config.model, length)
        self.source.vocab_limit = self.shape["vocab"]
        if self.held_out is not None:
            self.held_out.vocab_limit = self.shape["vocab"]
        if world.device.type == "cpu":
            keep_freed_memory()
        self.report = Report(config, self.shape, world)
        self.model = self._model()
        elastic, section = config.elastic is not None, config.fsdp_config
        self.optimizer = optimizer(config.optimizer, self.model, exact=elastic)
        self.factor = schedule(config.scheduler, self.units)
        size = config.device_train_microbatch_size
        self.gradients = Gradients(
            self.model,
            world,
            config.precision,
            None if size == "auto" else size,
            # The microbatches that a rank has must not change an elastic run's sums: it adds up a shard, then sends it.
            sync_last=elastic or (section is not None and section.sharding_strategy == "SHARD_GRAD_OP"),
            tree=elastic,
        )
        self.progress = Progress()
        torch.manual_seed(config.seed)  # nothing uses it yet, but checkpoints contain the generator's state
        self.log = RunLog(self.folder, world, config, watch)
        self.receipts: ReceiptLog | None = None
        self._loader: Loader | None = None
        self.probe: Probe | None = None
        self.saver = Saver(open_store(self.save_folder), config.save_num_checkpoints_to_keep, world.grouped)
        resume(self)

    def fit(self) -> Finished:
        """Train to the end; the folder then has the log, the receipts and the checkpoints."""
        config, loss, held_out_loss = self.config, math.nan, None
        self.begin()
        if config.probes and self.progress.step < self.stop:
            self.probe = Probe(self)
            self.probe.record()
        if config.eval_first and self.held_out is not None and self.progress.step < self.stop:
            held_out_loss = self.evaluate()
        while self.progress.step < self.stop:
            loss = self.step()
            last = self.progress.step == self.stop
            evaluates = self.held_out is not None and self._is_due(self.eval_every)
            if evaluates:
                held_out_loss = self.evaluate()
            saves = self._is_due(self.save_every)
            if saves:
                self.save()
            if (evaluates or saves) and not last:
                self.report.write(self)
        self.saver.wait()
        self.report.write(self, done=True)
        return Finished(self.progress.step, loss, held_out_loss, self.folder)

    def begin(self) -> None:
        """Open the log and the receipts where the run continues, and start to read rows."""
        config = self.config
        self.receipts = self._receipts()
        reported = self.report.begin(self)
        self.log.open(self.progress.step, self.progress.tokens)
        self.log.about(
            step=self.progress.step,
            steps=self.total,
            batch_tokens=config.global_train_batch_size * config.max_seq_len,
            parameters=presets.parameter_count(self.shape),
            processes=self.world.size,
            device=str(self.world.device),
            show_every=max(1, self.show_every),
            **reported,
        )
        world, elastic = self.world, config.elastic
        rank, count = world.data_rank, world.data_size
        shares = rounds(elastic.virtual_shards, rank, count) if elastic else [(rank, count)]
        self._loader = Loader(self.source, self.order, config.train_loader, shares, self.progress.step)

    def step(self) -> float:
        """Train on one global batch; returns its mean loss."""
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
        """Save a checkpoint; it is stored in the background."""
        self.saver.save(self.progress.step, state.tensors(self), state.facts(self))
        if self.probe is not None:
            self.probe.record()

    def evaluate(self) -> float:
        """Compute the mean loss on the held-out text."""
        assert self.held_out is not None
        self.model.eval()
        config, total, tokens = self.config, 0.0, 0
        started = time.perf_counter()
        with torch.no_grad():
            limit, batch = config.eval_subset_num_batches, config.device_eval_batch_size
            for rows in in_turn(self.held_out, batch, self.world.data_rank, self.world.data_size, limit):
                loss, count = self.gradients.held_out(*rows)
                total, tokens = total + loss, tokens + count
        self.model.train()
        reshard(self.model, self.world)
        total, all_tokens = self.world.sum([total, tokens])
        if not all_tokens:
            raise ConfigError("eval_loader holds no row")
        self.log.evaluation(self.progress.step, total / all_tokens, int(all_tokens), time.perf_counter() - started)
        return total / all_tokens

    def close(self) -> None:
        """Close files and threads; a checkpoint that is being stored is waited for."""
        with ExitStack() as stack:  # closes all even if one fails, the last one first
            for each in (self.source, self.held_out, self.log, self.receipts, self._loader, self.saver):
                if each is not None:
                    stack.callback(each.close)

    def _is_due(self, interval: int) -> bool:
        """Whether something happens after this step that happens every `interval` steps and at the end; 0: never."""
        return bool(interval) and (self.progress.step == self.stop or self.progress.step % interval == 0)

    def _durations(self) -> None:
        """Convert the configured durations to steps."""
        config = self.config
        units = Batches(config.global_train_batch_size, config.max_seq_len, len(self.source))
        self.total = batches("max_duration", config.max_duration, units)
        if self.total < 1:
            raise ConfigError(f"max_duration={config.max_duration} is no batch")
        self.units = replace(units, total=self.total)
        self.eval_every = batches("eval_interval", config.eval_interval, self.units)
        self.save_every = batches("save_interval", config.save_interval, self.units)
        self.show_every = batches("console_log_interval", config.console_log_interval, self.units)
        stop = batches("stop_after", config.stop_after, self.units) if config.stop_after else self.total
        self.stop = min(stop, self.total)

    @property
    def save_folder(self) -> str:
        """The folder or URL of the run's checkpoints."""
        folder = self.config.save_folder
        return folder.replace("{run_name}", self.config.run_name or "") if folder else str(self.folder / "checkpoints")

    def _model(self) -> Model:
        config, world = self.config, self.world
        vocab, limit = self.source.vocab, self.shape["vocab"]
        if vocab is not None and vocab > limit:
            raise ConfigError(f"the rows have ids up to {vocab - 1:,}, the model's vocabulary is {limit:,}")
        model = Model(self.shape, "meta" if world.grouped else world.device, ranks=world.tensor)
        model.chunk_logits = config.model.loss_fn != "torch_crossentropy"
        build.wrap(model, config)
        if world.grouped:
            shard(model, world, config)
            model.to_empty(device=world.device)
        build.start(model, config)
        return model

    def _receipts(self) -> ReceiptLog | None:
        """Open the receipts and write the configuration on rank 0; the others wait until the folder is ready."""
        log = None
        if self.world.rank == 0:
            log = ReceiptLog(self.folder, self.order, self.progress.step, self.progress.receipt)
            described = json.dumps(self.config.model_dump(mode="json"), indent=1)
            write_atomically(self.folder / CONFIG, described + "\n")
        self.world.barrier()
        return log
