"""The training loop: read a batch, compute its gradients, clip them, step the optimizer, record the step."""

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.common.units import parse_bytes
from roofline.models import presets
from roofline.train.checkpoint import manifest, state
from roofline.train.checkpoint.checkpoint import Saver
from roofline.train.checkpoint.outcome import TrainedFolder
from roofline.train.checkpoint.resume import resume
from roofline.train.config.duration import batches
from roofline.train.config.schema import TrainConfig
from roofline.train.data.loader import Loader, Rows, open_source
from roofline.train.data.receipts import ReceiptLog
from roofline.train.finetune import loaders
from roofline.train.memory.exhausted import affordable, limit_memory, room
from roofline.train.memory.meter import give_back_freed_memory, grow_segments, keep_freed_memory
from roofline.train.model import adaptation
from roofline.train.model.optim import optimizer
from roofline.train.model.shapes import model_config
from roofline.train.parallel import alike
from roofline.train.parallel.elastic import check
from roofline.train.parallel.processes import World, join, leave
from roofline.train.parallel.stopping import notes_of
from roofline.train.preference.objective import Facts
from roofline.train.preference.sampler import MakeSampler
from roofline.train.preference.start import preference_of
from roofline.train.report import loggers
from roofline.train.report.log import RunLog
from roofline.train.report.summary import RunReport
from roofline.train.run import evaluation, leak_proof, parts, preflight
from roofline.train.run.callbacks import Callbacks
from roofline.train.run.clip import clip
from roofline.train.run.determinism import deterministic
from roofline.train.run.failures import explained
from roofline.train.run.owner import Ownership
from roofline.train.run.probe import RunProbe
from roofline.train.run.progress import Finished, RunProgress
from roofline.train.run.recurring import recurring
from roofline.train.run.schedule import schedule
from roofline.train.run.signals import Signals
from roofline.train.run_folder import CONFIG, checkpoints_of, folder_of
from roofline.train.storage.open import open_store

PACKED_ROWS = 16  # rows that are looked at


Watch = Callable[[JsonObject], None]


def train(
    config: TrainConfig,
    watch: Watch | None = None,
    store: Path | None = None,
    make_sampler: MakeSampler | None = None,
) -> Finished:
    """Train as configured, in a process group if torchrun's environment variables are set.

    SIGTERM and SIGINT stop the run after its step, with a checkpoint; the second one does what it did before.

    watch: on rank 0, called with each line of the log. store: as for `join`. make_sampler: of a run of grpo. Raises
    ConfigError, UnsupportedError, CapacityError.
    """
    if config.deterministic_mode or config.elastic is not None:
        deterministic()
    if config.elastic is not None:
        check(config)
        torch.set_num_threads(config.elastic.threads)
    world = join(config, store)
    notes_of(world).allow(config.stop_timeout)
    if config.expandable_segments:
        grow_segments(world.device)
    if config.memory_limit is not None:
        limit_memory(parse_bytes("memory_limit", config.memory_limit))
    try:
        return _fit(config, world, watch, make_sampler)
    except (RuntimeError, MemoryError, OSError) as error:
        cause = explained(error, config, world)
        if cause is None:
            raise
        raise cause from error
    finally:
        leave(world)


def _fit(config: TrainConfig, world: World, watch: Watch | None, make_sampler: MakeSampler | None) -> Finished:
    """Apart from `train`, so that nothing of the run is left when its process group is destroyed."""
    world.first(lambda: preflight.check(config))
    with closing(Ownership(config, world)) as owner:
        world.first(lambda: loaders.prepare_all(config))
        with closing(Run(loaders.prepared(config), world, watch, owner, make_sampler)) as run:
            return run.fit()


class Run:
    """A run's state, built from its configuration and, if it continues, from a checkpoint."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        watch: Watch | None = None,
        owner: Ownership | None = None,
        make_sampler: MakeSampler | None = None,
    ) -> None:
        loggers.check(config.loggers)
        self.config, self.world, self.owner = config, world, owner
        self.shares = parts.shares(config, world)
        self.tunes = config.train_loader.name == "finetuning"
        self.folder, self.save_folder = folder_of(config), checkpoints_of(config)
        length, apart = config.max_seq_len, config.model.attn_config.attn_uses_sequence_id
        self.source = open_source(config.train_loader, length, apart)
        self.held_out = {label: open_source(loader, length, apart) for label, loader in config.evaluations.items()}
        parts.warn_of_missing_hashes(self)
        self.order = self.source.order(config.global_train_batch_size, config.seed)
        self._durations()
        self.shape = model_config(config.model, length)
        self.source.vocab_limit = self.shape["vocab"]
        for source in self.held_out.values():
            source.vocab_limit = self.shape["vocab"]
        if world.size > 1:
            alike.check(world, parts.inputs_of(self), alike.SAME_DATA)
        # What is kept counts against a limit, and of padded batches, each of another width, ever more would be kept.
        if world.device.type == "cpu":
            if config.memory_limit is not None or room() is not None:
                give_back_freed_memory()
            elif not self.tunes or self.packs:
                keep_freed_memory()
        available = affordable(world.device, world.local_size or world.size)
        self.forms = adaptation.forms(config, self.shape)
        self.base = world.share(world.first(lambda: parts.base_digest(config))) if self.forms else None
        self.report = RunReport(config, self.shape, world, self.forms)
        self.model = parts.model_of(self)
        self.optimizer = optimizer(config.optimizer, self.model, exact=config.elastic is not None)
        self.factor = schedule(config.scheduler, self.units)
        self.gradients = parts.gradients_of(self, available)
        self.progress = RunProgress()
        self.saved_step: int | None = None
        self.reason: str | None = None
        self.evaluations: dict[str, JsonObject] = {}  # the last of each label, as the card has them
        self.callbacks = Callbacks(config.callbacks, self.units, world)
        torch.manual_seed(config.seed)  # nothing uses it yet, but checkpoints contain the generator's state
        self.log = RunLog(self.folder, world, config, watch)
        self.receipts: ReceiptLog | None = None
        self._loader: Loader | None = None
        self.probe: RunProbe | None = None
        self.saver = Saver(open_store(self.save_folder), config.save_num_checkpoints_to_keep, world.grouped)
        resume(self)
        self.preference = preference_of(self, make_sampler)
        self.gradients.objective = self.preference.objective if self.preference is not None else None
        self.recurring = recurring(self)

    def fit(self) -> Finished:
        """Train to the end; the folder then has the log, the receipts and the checkpoints."""
        config, loss = self.config, math.nan
        self.begin()
        if config.probes and self.progress.step < self.stop:
            self.probe = RunProbe(self)
            self.probe.record()
        if config.eval_first and self.progress.step < self.stop:
            self.evaluate()
        with Signals() as signals:
            while self.progress.step < self.stop and not signals.any(self.world):
                loss = self.step()
                evaluates = bool(self.held_out) and self._is_due(self.eval_every)
                if evaluates:
                    self.evaluate()
                saves = self._is_due(self.save_every)
                if saves:
                    self.save()
                for each in self.recurring:
                    if self._is_due(each.every):
                        each.record()
                if (evaluates or saves) and self.progress.step < self.stop:
                    self.report.write(self)
                self.report.show_live(self)
            stopped = signals.number if self.progress.step < self.stop else 0
            notes_of(self.world).begin()
            saved = self._save_early() if stopped else None
        self.saver.wait()
        written = "" if stopped or math.isnan(loss) else self._evaluate_written()
        self.report.write(self, ended=True)
        return Finished(
            steps=self.progress.step,
            loss=loss,
            evaluations={label: figures["loss"] for label, figures in self.evaluations.items()},
            folder=self.folder,
            signal=stopped,
            saved=saved,
            reason=self.reason,
            written=written,
        )

    def _evaluate_written(self) -> str:
        """Evaluate the model that was written once more where it was rounded; what rounding did, in words."""
        for each in self.recurring:
            if isinstance(each, TrainedFolder):
                if each.round_model() and self.held_out:
                    self.evaluate()
                return each.describe_rounding()
        return ""

    def begin(self) -> None:
        """Open the log and the receipts where the run continues, and start to read rows."""
        config = self.config
        self.receipts = self._receipts()
        proof = leak_proof.prove(self) if self.progress.step < self.stop and self.packs else None
        prepared = self.preference.begin() if self.preference is not None else {}
        reported = self.report.begin(self) | prepared
        self.log.open(self.progress.step, self.progress.tokens)
        self._heed(self.callbacks.begin(self.folder, self.progress.step))
        self.log.about(
            step=self.progress.step,
            steps=self.total,
            batch_tokens=config.global_train_batch_size * config.max_seq_len,
            parameters=presets.parameter_count(self.shape),
            processes=self.world.size,
            device=str(self.world.device),
            show_every=max(1, self.show_every),
            leak_proof=proof,
            saves=bool(self.save_every or self.config.adapter or self.config.callbacks.hf_checkpointer),
            **reported,
        )
        self._loader = Loader(self.source, self.order, config.train_loader, self.shares, self.progress.step)

    @cached_property
    def packs(self) -> bool:
        """Whether rows hold several documents, which are kept apart; told from the first ones, alike on all ranks."""
        steps = range(-(-PACKED_ROWS // self.order.global_batch))
        numbers = np.concatenate([self.order.batch(step) for step in steps])[:PACKED_ROWS]
        documents = self.source.rows(numbers).documents
        return documents is not None and int(documents.max()) > 0

    def step(self) -> float:
        """Train on one global batch; returns its mean loss."""
        assert self._loader is not None
        started = time.perf_counter()
        rows = next(self._loader)
        waited = time.perf_counter() - started
        self.optimizer.set_factor(self.factor(rows.step))
        method, facts, own = self.preference, list[Facts](), dict[str, float]()
        if method is not None:
            rows, facts = method.prepare(rows)
        for _ in range(method.updates if method is not None else 1):
            loss, norm = self._update(rows, facts)
        if method is not None:
            own = self.gradients.figures | method.figures
        scaler = self.gradients.scaler
        self.progress.step += 1
        counted = self.gradients.counted
        self.progress.tokens += counted.real
        self.progress.digests += self.gradients.row_digest
        if self.receipts is not None:
            self.progress.receipt = self.receipts.add(rows.ids, self.gradients.row_digest)
        seconds = time.perf_counter() - started
        self.report.step(seconds, waited, counted)
        line = self.log.step(
            step=self.progress.step,
            tokens=self.progress.tokens,
            loss=loss,
            lr=self.optimizer.lr,
            grad_norm=norm,
            seconds=seconds,
            wait=waited,
            microbatch=self.gradients.size or 0,
            **({"loss_scale": scaler.scale} if scaler else {}),
            **own,
            **(asdict(counted) if self.tunes else {}),
        )
        self._heed(self.callbacks.step(line))
        return loss

    def _update(self, rows: Rows, facts: Sequence[Facts]) -> tuple[float, float]:
        """Change the parameters by the gradients of a batch; returns its mean loss, and the gradients' norm."""
        loss_sum, units = self.gradients.backward(rows, facts)
        scaler = self.gradients.scaler
        clipping = self.config.algorithms.gradient_clipping
        norm = clip(self.model, self.world, clipping, scaler.scale if scaler else 1.0, self.config.elastic is not None)
        finite, loss = math.isfinite(norm), loss_sum / max(1, units)
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
        return loss, norm

    def save(self) -> None:
        """Save a checkpoint; it is stored in the background. Raises ConfigError if its place has another owner now."""
        if self.owner is not None:
            self.world.first(self.owner.check)
        self.saved_step = self.progress.step
        self.saver.save(self.progress.step, state.tensors(self), state.facts(self))
        if self.probe is not None:
            self.probe.record()

    def _save_early(self) -> str | None:
        """Save where a signal stops the run; the checkpoint's place, None if it holds those of another run."""
        if self.saved_step != self.progress.step:
            # Without a save_interval nobody was asked what is to become of checkpoints that are there.
            permitted = self.save_every or self.config.autoresume or self.saved_step is not None
            if not permitted and self.world.share(manifest.steps(self.saver.store)):
                return None
            self.save()
            for each in self.recurring:
                if each.with_checkpoints:
                    each.record()
        self.saver.wait()
        return f"{self.saver.store.url}/{manifest.folder(self.progress.step)}"

    def evaluate(self) -> None:
        """Compute the mean loss on each held-out text."""
        for label in self.held_out:
            self._heed(self.callbacks.evaluation(evaluation.record(self, label)))

    def held_out_loss(self, label: str, facts: Callable[[np.ndarray], Facts] | None = None) -> tuple[float, int]:
        """`evaluation.held_out_loss`, for methods that evaluate by it."""
        return evaluation.held_out_loss(self, label, facts)

    def close(self) -> None:
        """Close files and threads; a checkpoint that is being stored is waited for."""
        sources = (self.source, *self.held_out.values())
        with ExitStack() as stack:  # closes all even if one fails, the last one first
            for closable in (
                *sources,
                self.log,
                self.receipts,
                self._loader,
                self.callbacks,
                self.saver,
                self.preference,
            ):
                if closable is not None:
                    stack.callback(closable.close)

    def _heed(self, reason: str | None) -> None:
        """End the run after this step if a callback has said why."""
        if reason is not None:
            self.reason, self.stop = reason, self.progress.step

    def _is_due(self, interval: int) -> bool:
        """Whether something happens after this step that happens every `interval` steps and at the end; 0: never."""
        return bool(interval) and (self.progress.step == self.stop or self.progress.step % interval == 0)

    def _durations(self) -> None:
        """Convert the configured durations to steps."""
        config = self.config
        units = parts.units_of(config, self.source)
        self.total = parts.steps_of(config, units, self.source, self.order)
        self.units = replace(units, total=self.total, end=config.max_duration)
        self.eval_every = batches("eval_interval", config.eval_interval, self.units)
        self.save_every = batches("save_interval", config.save_interval, self.units)
        self.show_every = batches("console_log_interval", config.console_log_interval, self.units)
        stop = batches("stop_after", config.stop_after, self.units) if config.stop_after else self.total
        self.stop = min(stop, self.total)

    def _receipts(self) -> ReceiptLog | None:
        """Open the receipts and write the configuration on rank 0; the others wait until the folder is ready."""
        log = None
        if self.world.rank == 0:
            progress = self.progress
            log = ReceiptLog(self.folder, self.order, progress.step, progress.receipt, progress.digests)
            described = json.dumps(self.config.model_dump(mode="json"), indent=1)
            write_atomically(self.folder / CONFIG, described + "\n")
        self.world.barrier()
        return log
