"""roofline bench decode: tokens a second of single requests, as MLC measured them."""

from typing import Annotated

from roofline.cli.measure.load_options import TARGET_HELP, LoadTestOptions, tell_points
from roofline.cli.options import AsJsonLines
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Option


def command(
    target: Annotated[str, Argument(TARGET_HELP)],
    options: LoadTestOptions,
    repeats: Annotated[int, Option("Of each measurement.", minimum=1, unit="repeats")] = 5,
    batch: Annotated[int, Option("Requests at a time.", minimum=1, unit="requests")] = 1,
    prompts: Annotated[str, Option("Lengths of prompts, with commas: a point each.")] = "1",
    answer: Annotated[int, Option("Tokens of each answer.", minimum=2, unit="tokens")] = 512,
    as_json: AsJsonLines = False,
) -> None:
    """Time decoding of single requests, by default behind a prompt of 1 token and for 512 tokens.

    --prompts 1,1024,8192 measures how it slows down with the context.
    """
    from roofline.bench.serving.load_test import open_load_test
    from roofline.bench.serving.series import decode
    from roofline.bench.traffic.presets import singles

    lengths = _lengths(prompts)
    if options.preset or options.traffic:
        raise ConfigError("decode makes its own traffic, of --prompts and --answer: leave --preset and --traffic out")
    traffic = singles(lengths, answer, repeats * batch, options.seed, options.natural)
    with open_load_test(options.settings(target), traffic, batch) as test:
        tell_points(test, decode(test, len(lengths), repeats, batch), as_json, len(lengths))


def _lengths(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--prompts {text}: give numbers of tokens above 0, with commas, such as 1,1024")
    return [int(word) for word in words]
