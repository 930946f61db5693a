"""Dry runs of one model and one form of step are counted once: tests train the same few models hundreds of times, and
what a dry run takes is a third of such a run. Where only the number of rows differs, what was counted is scaled: what
is exact of it, tests/train/test_memory.py looks at with the plain dry run.
"""

import copy
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# What a dry run reads of a configuration; what else changes its result is among its other arguments.
OF_CONFIG: Any = {
    "model": {"loss_fn", "attn_config"},
    **dict.fromkeys(("fsdp_config", "precision", "max_seq_len"), True),
}


def remembering(dry_run: Callable[..., Any]) -> Callable[..., Any]:
    """`dry_run` that answers calls whose arguments are equal, but for their rows, from memory.

    What it raises is not remembered.
    """
    usages: dict[tuple[object, ...], tuple[int, Any]] = {}

    def remembered(
        config: Any,
        shape: Mapping[str, Any],
        world: Any,
        dtype: Any,
        rows: int,
        several: bool | None = None,
        forms: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        place = (world.device.type, world.grouped, world.tensor.rank, world.tensor.size)
        sections = config.model_dump_json(include=OF_CONFIG)
        key = (sections, json.dumps(shape, sort_keys=True), *place, dtype, several, repr(sorted(forms.items())))
        if key not in usages:
            usages[key] = rows, dry_run(config, shape, world, dtype, rows, several, forms)
        return for_rows(rows, *usages[key])

    return remembered


def for_rows(rows: int, counted_rows: int, usage: Any) -> Any:
    """A copy of the usage of so many counted rows as it is, but for rounding, for `rows`. Gradients do not grow."""
    scaled = copy.deepcopy(usage)
    for parts in (scaled.parts, scaled.most):
        for part in parts.keys() - {"gradients"}:
            parts[part] = parts[part] * rows // counted_rows
    scaled.first = usage.first * rows // counted_rows
    return scaled
