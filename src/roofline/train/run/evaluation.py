"""Evaluates a run on data that it does not train on."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.train.data.loader import in_turn
from roofline.train.parallel.processes import reshard
from roofline.train.preference.objective import Facts

if TYPE_CHECKING:
    from roofline.train.run.loop import Run


def record(run: "Run", label: str) -> JsonObject:
    """Compute the mean loss on a held-out data set; its line in the log."""
    started = time.perf_counter()
    if run.preference is not None:
        loss, units, figures = run.preference.evaluate(label)
    else:
        loss, units = held_out_loss(run, label)
        figures = {"perplexity": math.exp(min(loss, 700.0))}
    name, seconds = run.config.evaluations[label].label, time.perf_counter() - started
    run.evaluations[label] = {"step": run.progress.step, "loss": loss, **figures}
    return run.log.evaluation(name, run.progress.step, loss, units, seconds, figures)


def held_out_loss(run: "Run", label: str, facts: Callable[[np.ndarray], Facts] | None = None) -> tuple[float, int]:
    """The mean loss on a held-out data set, and the tokens (of an objective: units) it was taken over.

    facts: what the objective has to know of samples.
    """
    run.model.eval()
    config, source, world, total, units = run.config, run.held_out[label], run.world, 0.0, 0
    with torch.no_grad():
        limit, batch = config.eval_subset_num_batches, config.device_eval_batch_size
        for numbers, rows in in_turn(source, batch, world.data_rank, world.data_size, limit):
            loss, count = run.gradients.held_out(rows, facts(numbers) if facts is not None else None)
            total, units = total + loss, units + count
    run.model.train()
    reshard(run.model, world)
    total, all_units = world.sum([total, units])
    if not all_units:
        name = "eval_loader" if label == "eval" else f"the eval_loader labelled {label}"
        raise ConfigError(f"{name} holds no row")
    return total / all_units, int(all_units)
