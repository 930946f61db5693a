"""Measures the speed and memory of a run, and writes them into card.json and run.html."""

import json
import math
import shlex
import statistics
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING

from roofline.common.files import write_atomically
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.hardware.roofs import TOLERANCE, confirmed
from roofline.models import presets
from roofline.train.config.schema import FsdpSection, TrainConfig
from roofline.train.data.row_arrays import Counted
from roofline.train.memory.estimate import Memory, Prediction
from roofline.train.model.form import ParameterForm
from roofline.train.parallel.processes import COMPUTE, World
from roofline.train.report import machine, page
from roofline.train.report.cards import VERSION
from roofline.train.report.flops import ADAPTED, CONVENTIONS, per_token, usual
from roofline.train.run_folder import CARD, CONFIG

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

PAGE_SHARE = 0.02  # of a run's time that writing its page may take
LIVE_SECONDS = 5.0  # between two pages that are written for whoever watches


class RunReport:
    """The figures of a run, on every rank. It must be made before the model, whose memory is measured from then on.

    Args:
        shape: the canonical configuration of the model. forms: of its frozen parameters, by name.
    """

    def __init__(
        self,
        config: TrainConfig,
        shape: JsonMapping,
        world: World,
        forms: Mapping[str, ParameterForm] = MappingProxyType({}),
    ) -> None:
        self.config, self.shape, self.world = config, shape, world
        section, apart = config.fsdp_config, config.model.attn_config.attn_uses_sequence_id
        checkpointing = section.activation_checkpointing if section is not None else False
        self.checkpointing = "full" if checkpointing is True else checkpointing or None
        self.flops = per_token(shape, config.max_seq_len, self.checkpointing, apart, forms)
        configured = config.callbacks.speed_monitor.gpu_flops_available
        self.peak, self.no_peak = machine.peak_of(world.device, config.precision, configured)
        self.roof: JsonObject | None = None
        self.memory = Memory(config, shape, world, forms)
        self._seconds, self._waits, self._since = array("d"), array("d"), math.nan
        self._next_page = self._next_live = 0.0
        self._measured: int | None = None  # bytes, when the card was last written by all ranks
        self._real, self._computed, self._trained = array("q"), array("q"), array("q")  # tokens of each step

    def begin(self, run: "Run") -> JsonObject:
        """Measure what must be measured before the first step; returns what the log's first line has of it."""
        self.memory.measure_compiled_block(run.model)
        if self.peak is None:
            self.world.barrier()  # processes that share a machine must measure at the same time
            self.roof = machine.measured_roof(self.world.device, COMPUTE[self.config.precision])
        self.memory.restart()
        self._next_live = time.perf_counter() + LIVE_SECONDS
        predicted = self.memory.predicted
        return {
            "memory": None if predicted is None else self._about_memory(predicted),
            "share": self._share(),
        }

    def _about_memory(self, predicted: Prediction) -> JsonObject:
        """What the log's first line has of a prediction. free: bytes that were free before the model was made."""
        about = {"predicted": predicted.total, "parts": predicted.parts, "rows": predicted.rows}
        return about | {"free": self.memory.free}

    def step(self, seconds: float, waited: float, counted: Counted) -> None:
        """Record the seconds of a step, how many of them were spent waiting for data, and its tokens."""
        self._real.append(counted.real)
        self._computed.append(counted.computed)
        self._trained.append(counted.trained)
        self._seconds.append(seconds)
        self._waits.append(waited)
        if len(self._seconds) <= self.config.callbacks.speed_monitor.warmup:
            self._since = time.perf_counter()

    def write(self, run: "Run", ended: bool = False) -> None:
        """Write the card and the page; all ranks must call it. A run without a step changes nothing.

        ended: no step follows in this process, be the run finished or stopped.
        """
        self._measured = self.memory.peak()
        self._confirm_roof(run)
        if self.world.rank != 0 or not self._seconds:
            return
        if self.memory.predicted is not None and 0 < (run.gradients.size or 0) < self.memory.rows:
            self.memory.predict(run.gradients.size or 0)
        card = self._write_card(run, ended)
        if ended or time.perf_counter() > self._next_page:
            self._write_page(run)
        if ended:
            run.log.memory(card["memory"])

    def show_live(self, run: "Run") -> None:
        """On rank 0, write card and page between two times that `write` does, for whoever watches the run."""
        if self.world.rank == 0 and self._seconds and time.perf_counter() > self._next_live:
            self._write_card(run, ended=False)
            self._write_page(run)

    def _write_card(self, run: "Run", ended: bool) -> JsonObject:
        card = self._card(run, self._measured, ended)
        write_atomically(run.folder / CARD, json.dumps(card, indent=1) + "\n")
        return card

    def _write_page(self, run: "Run") -> None:
        started = time.perf_counter()
        page.write(run.folder)
        spent = time.perf_counter() - started
        self._next_page = time.perf_counter() + spent / PAGE_SHARE
        self._next_live = max(self._next_page, started + LIVE_SECONDS)

    def _confirm_roof(self, run: "Run") -> None:
        """Measure the roof again, on all ranks, while the run is faster than it allows."""
        if self.roof is None or not self._seconds:
            return
        flops, kind, dtype = self.flops["matmul"].hardware, self.world.device, COMPUTE[self.config.precision]
        rate = self._speed(run)["computed_per_s_per_device"]

        def share(roof: JsonObject) -> float:
            return self.world.share(rate * flops / float(roof["flops"]))

        def again(roof: JsonObject) -> JsonObject:
            self.world.barrier()
            return machine.higher_roof(roof, kind, dtype)

        self.roof = confirmed(self.roof, share, again)[0]

    def _shares(self, rate: float) -> JsonObject:
        """The card's peak and roof at that many tokens/s of a device; a share that cannot be is left out, and why.

        Neither a table nor a configuration can be measured again: such a peak is another device's.
        """
        peak, no_peak, roof = self.peak, self.no_peak, self.roof
        if peak is not None:
            reached = rate * max(flops.hardware for flops in self.flops.values()) / peak.flops
            if reached > TOLERANCE:
                no_peak = f"the run reached {reached:.0%} of {peak.flops / 1e12:,.1f} TFLOP/s ({peak.source})"
                peak, no_peak = None, f"{no_peak}, so that is not the peak of this device"
        if roof is not None:
            share = rate * self.flops["matmul"].hardware / roof["flops"]
            roof = {**roof, "share": share if share <= TOLERANCE else None}
        return {"peak": None if peak is None else asdict(peak), "no_peak": no_peak, "roof": roof}

    def _share(self) -> JsonObject:
        """The factor from tokens/s to the share of peak or roof that is shown with them, and the share's name."""
        devices = self.world.size
        if self.peak is not None:
            return {"name": "MFU", "per_token_s": self.flops[usual(self.flops)].model / (devices * self.peak.flops)}
        assert self.roof is not None
        per_token_s = self.flops["matmul"].hardware / (devices * self.roof["flops"])
        return {"name": "of the matmul roof", "per_token_s": per_token_s}

    def _card(self, run: "Run", measured: int | None, ended: bool) -> JsonObject:
        done = ended and (run.progress.step >= run.total or run.reason is not None)
        config, world, predicted = self.config, self.world, self.memory.predicted
        section, shape = config.fsdp_config or FsdpSection(), dict(self.shape)
        speed = self._speed(run)
        rate = speed["computed_per_s_per_device"]
        rows = -(-config.global_train_batch_size // world.data_size)
        shares = self._shares(rate)
        again = ["roofline", "train", str(run.folder / CONFIG), "--set", f"run_folder={run.folder}-again"]
        again += ["--nproc", str(world.size)] if world.size > 1 else []
        keys = ("family", "layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab")
        return {
            "version": VERSION,
            "conventions": ADAPTED if run.forms else CONVENTIONS,
            "run": config.run_name,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "done": done,
            "stopped": ended and not done,  # by a signal or by stop_after; the same command goes on
            "ended_by": run.reason,  # a callback's words; null where it was the length of the run
            "model": {"name": self._name(), "parameters": presets.parameter_count(shape)} | {k: shape[k] for k in keys},
            "seq_len": config.max_seq_len,
            "global_batch": config.global_train_batch_size,
            "microbatch": run.gradients.size,
            "grad_accum": -(-rows // (run.gradients.size or rows)),
            "devices": world.size,
            "device": machine.device(world.device),
            "precision": config.precision,
            "mp_mode": section.mixed_precision if world.grouped else None,
            "sharding": section.sharding_strategy if world.grouped else None,
            "tensor_parallel": config.tensor_parallel,
            "elastic": config.elastic is not None,
            "checkpointing": self.checkpointing,
            "compile": None if config.compile_config is None else config.compile_config.model_dump(),
            "optimizer": config.optimizer.name,
            "evaluations": run.evaluations,
            "speed": speed,
            "flops": self._utilization(rate, shares["peak"]),
            **shares,
            "memory": {
                "predicted": None if predicted is None else {"total": predicted.total, "parts": predicted.parts},
                "measured": measured,
                "measured_as": "max_memory_allocated" if world.device.type != "cpu" else "peak resident, no files",
            },
            "versions": machine.versions(),
            "command": shlex.join(again),
        }

    def _name(self) -> str:
        """The name of the preset with this shape, whatever its context; else the configuration's name."""
        section, shape = self.config.model, dict(self.shape, max_position=0)
        for name in presets.names():
            if dict(presets.preset(name), max_position=0) == shape:
                return name
        files = section.pretrained_model_name_or_path if section.name == "hf_causal_lm" else None
        return files or section.name + (" (changed)" if section.config_overrides else "")

    def _speed(self, run: "Run") -> JsonObject:
        left_out = min(self.config.callbacks.speed_monitor.warmup, len(self._seconds) - 1)
        counted, waits = self._seconds[left_out:], self._waits[left_out:]
        spent, first = sum(counted), run.progress.step - len(self._seconds)
        tokens, computed = sum(self._real[left_out:]) / spent, sum(self._computed[left_out:]) / spent
        since = time.perf_counter() - self._since if left_out else math.nan
        return {
            "tokens_per_s": tokens,
            "tokens_per_s_per_device": tokens / self.world.size,
            "computed_per_s_per_device": computed / self.world.size,  # with padding
            "padding_share": 1 - tokens / computed,
            "trained_share": sum(self._trained[left_out:]) / spent / tokens,
            "rows_per_s": self.config.global_train_batch_size * len(counted) / spent,
            "step_seconds": {"p50": statistics.median(counted), "p95": _quantile(counted, 0.95)},
            "wait_share": sum(waits) / spent,
            "elsewhere_share": max(0.0, 1 - spent / since) if since > 0 else None,
            "steps": [first + left_out + 1, run.progress.step],
            "left_out": {"steps": left_out, "why": "the first steps compile, allocate and find the microbatch"},
        }

    def _utilization(self, rate: float, peak: JsonMapping | None) -> JsonObject:
        shares = {}
        for name, flops in self.flops.items():
            model, hardware = rate * flops.model, rate * flops.hardware
            shares[name] = {
                "model_flops_per_token": flops.model,
                "hardware_flops_per_token": flops.hardware,
                "tflops_per_device": model / 1e12,
                "mfu": None if peak is None else model / peak["flops"],
                "hfu": None if peak is None else hardware / peak["flops"],
            }
        return shares


def _quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]
