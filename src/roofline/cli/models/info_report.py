"""What `roofline info` finds out of a model: a report, and the report as plain data."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.common.json_types import JsonObject

if TYPE_CHECKING:
    from roofline.backends.fit import Fit
    from roofline.bundle.shape import ModelShape
    from roofline.hardware.chips.products import Product
    from roofline.models.config import ModelConfig
    from roofline.program.summary import Summary

CONTEXT = 4096  # tokens, where nothing else is said and the model has as many positions
CACHE_FORMATS = ("bf16", "int8", "e4m3fn")
# What a whole file is looked at in; of these, those that the formats we have can say.
FILE_FORMATS = ("F32", "BF16", "E4M3", "Q8_0", "Q6_K", "Q5_K", "Q4_K_M", "Q4_1", "Q4_0")


@dataclass(frozen=True)
class Takes:
    """Bytes of all weights with the matrices in a format, None where rows are no whole number of its blocks."""

    format: str
    bytes: int | None


@dataclass(frozen=True)
class InfoReport:
    """All that the command prints. other_formats: of the weights that would fit where `fit` does not; ends: the tokens
    that an answer ends at, by id, None where no tokenizer is there."""

    shape: "ModelShape"
    config: "ModelConfig"
    summary: "Summary"
    takes: tuple[Takes, ...]
    dtype: str
    context: int
    fit: "Fit | None"
    other_formats: tuple[str, ...] = ()
    no_kernels: str = ""
    ends: Mapping[int, str] | None = None


def examine(
    model: str,
    chip: str = "",
    count: int | None = None,
    context: int | None = None,
    dtype: str = "",
    kv_cache_dtype: str = "auto",
    memory: float | None = None,
) -> InfoReport:
    """What the command tells of a model. Raises ConfigError, UnsupportedError, CapacityError as the command does."""
    from roofline.bundle.shape import as_loaded, open_shape
    from roofline.hardware.chips import chips, products
    from roofline.models.registry import configure
    from roofline.program.restate import format_named, restate
    from roofline.program.summary import summarize
    from roofline.program.trace import trace

    product = products.titled(chip) if chip else None
    if product is not None and memory is not None:
        product = product.with_memory(memory)
    form = format_named(dtype) if dtype else ""
    on_host = product is None or product.host
    shape = as_loaded(open_shape(model), "cpu" if on_host else "gpu")
    family, config = configure(shape.config)
    positions = config.max_position
    if context is not None and context > positions:
        raise ConfigError(f"--context={context}: {shape.name} was trained for {positions:,} positions")
    context = context or min(CONTEXT, positions)
    summary = summarize(trace(family, config, shape.tensors), shape.tensors)
    takes = tuple(_takes(shape, name) for name in dict.fromkeys((*FILE_FORMATS, *filter(None, [form]))))
    looked_at = replace(shape, tensors=restate(shape.tensors, form)) if form else shape
    fit = _fit(looked_at, config, product, count, context, kv_cache_dtype)
    report = InfoReport(
        shape=shape,
        config=config,
        summary=summary,
        takes=takes,
        dtype=form,
        context=context,
        fit=fit,
        ends=_ends(model) if shape.has_weights else None,
    )
    if product is None:
        return report
    return replace(
        report,
        other_formats=() if fit is None or fit.fits else _that_fit(report, fit),
        no_kernels="" if product.host else chips.refused(product.chip) or "",
    )


def _ends(model: str) -> dict[int, str] | None:
    from roofline.bundle.shape import tokenizer_of

    try:
        tokenizer = tokenizer_of(model)
    except (ConfigError, UnsupportedError):  # what to do about it is told by who needs a tokenizer
        return None
    return {token_id: tokenizer.token_string(token_id) for token_id in tokenizer.eos_ids}


def _fit(
    shape: "ModelShape",
    config: "ModelConfig",
    product: "Product | None",
    count: int | None,
    context: int,
    kv_cache_dtype: str,
) -> "Fit":
    from roofline.backends.fit import MOST_DEVICES, on_product, on_this_machine

    if product is None:
        return on_this_machine(shape, config, context, kv_cache_dtype)
    if count is not None and count > MOST_DEVICES:
        raise ConfigError(f"--count={count}: at most {MOST_DEVICES} devices share a model (roofline plan has copies)")
    try:
        return on_product(shape, config, product, context, count, kv_cache_dtype)
    except CapacityError as error:
        if count is None:
            raise
        raise ConfigError(
            f"--count={count}: so many devices cannot share {shape.name}, which has {error.available:,} "
            f"{error.unit}: give at most {error.available:,}"
        ) from error


def _takes(shape: "ModelShape", form: str) -> Takes:
    from roofline.program.restate import nbytes, restate

    try:
        return Takes(form, nbytes(restate(shape.tensors, form)))
    except (ConfigError, UnsupportedError):  # rows that are no whole blocks, also not of what ggml takes instead
        return Takes(form, None)


def _that_fit(report: InfoReport, fit: "Fit") -> tuple[str, ...]:
    """Formats in which the fullest device's weights would leave room, by what they save of all weights."""
    own = next((row.bytes for row in report.takes if row.format == report.dtype), None) or report.summary.bytes
    room = fit.memory - fit.workspace
    return tuple(row.format for row in report.takes if row.bytes is not None and fit.weights * row.bytes / own < room)


def record(report: InfoReport) -> JsonObject:
    """The report as plain data. What no table says is null."""
    summary, fit = report.summary, report.fit
    groups = {form: summary.kv_bytes(form) for form in CACHE_FORMATS}
    return {
        "model": report.shape.name,
        "known": True,
        "kind": report.shape.kind,
        "source": report.shape.source,
        "notes": list(report.shape.notes),
        "config": dict(report.shape.config),
        **asdict(summary),
        "bytes": summary.bytes,
        "ends": None if report.ends is None else [{"id": i, "token": token} for i, token in report.ends.items()],
        "takes": {row.format: row.bytes for row in report.takes},
        "context": report.context,
        "kv_token_bytes": groups,
        "kv_bytes": {form: size * report.context for form, size in groups.items()},
        "dtype": report.dtype,
        "fit": None if fit is None else _finite({**asdict(fit), "fits": fit.fits}),
        "other_formats": report.other_formats,
        "no_kernels": report.no_kernels,
    }


def _finite(value: Mapping[str, object]) -> JsonObject:
    """Without infinite numbers, which JSON does not have: such a roof is none."""
    return {
        key: _finite(part) if isinstance(part, dict) else None if part == math.inf else part
        for key, part in value.items()
    }
