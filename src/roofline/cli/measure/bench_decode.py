"""roofline bench decode: tokens a second of single requests, as MLC measured them."""

from typing import Annotated

from roofline.cli.measure.load_options import FOOTNOTE, TARGET_HELP, LoadTestOptions, tell_points
from roofline.cli.options import AsJson
from roofline.cli.output import console
from roofline.cli.parser import Argument
from roofline.common.options import Option


def command(
    target: Annotated[str, Argument(TARGET_HELP)],
    options: LoadTestOptions,
    repeats: Annotated[int, Option("Of each measurement.", minimum=1, unit="repeats")] = 5,
    batch: Annotated[int, Option("Requests at a time.", minimum=1, unit="requests")] = 1,
    as_json: AsJson = False,
) -> None:
    """Time decoding: a prompt of 1 token and an answer of 512, one request at a time. Traffic: mlc."""
    from roofline.bench.serving.load_test import WARM_UP, open_load_test
    from roofline.bench.serving.series import decode

    traffic = options.traffic_of(WARM_UP + repeats * batch, "mlc")
    with open_load_test(options.settings(target), traffic, batch) as test:
        tell_points(test, decode(test, repeats, batch), as_json)
    if not as_json:
        console().print(FOOTNOTE, style="dim", highlight=False)
