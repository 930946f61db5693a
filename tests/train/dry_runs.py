"""Dry runs of one model and one form of step are counted once: tests train the same few models hundreds of times, and
what a dry run takes is a third of such a run. Where only the number of rows or their length differs, what was counted
is scaled: what is exact of it, tests/train/test_memory.py looks at with the plain dry run.
"""

import copy
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# What a dry run reads of a configuration; what else changes its result is among its other arguments.
OF_CONFIG: Any = {
    "model": {"loss_fn", "attn_config"},
    **dict.fromkeys(("fsdp_config", "precision"), True),
}


def remembering(dry_run: Callable[..., Any]) -> Callable[..., Any]:
    """`dry_run` that answers calls from memory whose arguments are equal, but for their rows, the length of these, the
    model's constants, and which adapters are trained beside which form of it.

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
        sizes = {name: value for name, value in shape.items() if not isinstance(value, float)}
        key = (sections, json.dumps(sizes, sort_keys=True), *place, dtype, several, bool(forms))
        tokens = rows * config.max_seq_len
        if key not in usages:
            usages[key] = tokens, dry_run(config, shape, world, dtype, rows, several, forms)
        return for_tokens(tokens, *usages[key])

    return remembered


def for_tokens(tokens: int, counted_tokens: int, usage: Any) -> Any:
    """A copy of the usage of so many counted tokens as it is, but for rounding, for `tokens`. Gradients do not grow."""
    scaled = copy.deepcopy(usage)
    for parts in (scaled.parts, scaled.most):
        for part in parts.keys() - {"gradients"}:
            parts[part] = parts[part] * tokens // counted_tokens
    scaled.first = usage.first * tokens // counted_tokens
    return scaled
