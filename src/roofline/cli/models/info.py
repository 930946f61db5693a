"""roofline info: what a model is, what it takes, and what fits on a chip, from its Program and tables alone."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from roofline.cli.options import MOST_MEMORY, AsJson, KvCacheDtype
from roofline.cli.output import print_json
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Option


def command(
    model: Annotated[
        str,
        Argument(
            "A path (weights, a bundle, a config.json), a name from `roofline list`, or the name of a shape, such as "
            "llama-3.1-405b. Default: the default model."
        ),
    ] = "",
    chip: Annotated[str, Option("What fits on this product, such as MI300X or H100 SXM. Default: this machine.")] = "",
    count: Annotated[
        int | None, Option("Devices of the chip that share the model. Default: as few as it fits on.", minimum=1)
    ] = None,
    context: Annotated[
        int | None, Option("Tokens of each sequence. Default: 4096, or what the model has.", minimum=1)
    ] = None,
    dtype: Annotated[
        str, Option("Look at the weights as if they were in this format (bf16, fp8, q8_0, q4_k_m, ...).")
    ] = "",
    kv_cache_dtype: KvCacheDtype = "auto",
    memory: Annotated[
        float | None,
        Option(
            "GB of memory of the chip, where it is sold with several sizes or with none.",
            minimum=1,
            maximum=MOST_MEMORY,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Tell what a model is, what it takes in memory, and what fits on a chip and how fast that is at most.

    No weights are read. Ends with status 1 for a file of an architecture that we do not have, after telling what its
    keys say of it.
    """
    from roofline.cli.models import info_text
    from roofline.cli.models.info_report import examine, record
    from roofline.weights.config.unfamiliar import unfamiliar
    from roofline.weights.sources import DEFAULT_MODEL

    if count is not None and not chip:
        raise ConfigError("--count is of a chip: name one with --chip")
    if memory is not None and not chip:
        raise ConfigError("--memory is of a chip: name one with --chip")
    name = model or DEFAULT_MODEL
    strange = unfamiliar(Path(name))
    if strange is not None:
        print_json({"model": name, "known": False, **asdict(strange)}, indent=1) if as_json else info_text.tell(strange)
        return 1
    report = examine(name, chip, count, context, dtype, kv_cache_dtype, memory)
    print_json(record(report), indent=1) if as_json else info_text.show(report)
    return 0
