"""roofline bench traffic: a file of requests that load tests send, the same bytes everywhere."""

from pathlib import Path
from typing import Annotated, Literal

from roofline.cli.output import check_output, console
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Option


def command(
    preset: Annotated[str, Argument("typical, long, dell, mlc, rocm, chat, multi-turn; trace with --trace FILE.")],
    out: Annotated[Path, Option("The file to write.", flags=("--out", "-o"))],
    requests: Annotated[int | None, Option("How many. Default: what the preset has.", minimum=1)] = None,
    seed: Annotated[int, Option("Of lengths and texts.", minimum=0)] = 0,
    stop: Annotated[
        Literal["preset", "natural", "ignored"], Option("Whether answers end where the model ends them.")
    ] = "preset",
    trace: Annotated[Path | None, Option("A trace of Mooncake (JSON lines) or Azure (CSV) to send.")] = None,
) -> None:
    """Write the requests of a load test to a file, and print its SHA-256, by which results name it."""
    from roofline.bench.traffic.presets import preset_traffic
    from roofline.bench.traffic.traces import from_trace
    from roofline.bench.traffic.traffic import write_traffic

    if (preset == "trace") != (trace is not None):
        raise ConfigError("a recorded trace is written with `bench traffic trace --trace FILE`")
    check_output(out)
    if trace is not None:
        traffic = from_trace(trace, requests, seed)
    else:
        traffic = preset_traffic(preset, requests, seed, None if stop == "preset" else stop)
    write_traffic(traffic, out)
    prompts = sum(request.prompt_tokens for request in traffic.requests)
    answers = sum(request.max_tokens for request in traffic.requests)
    count = len(traffic.requests)
    console().print(
        f"{out}: {count:,} requests, prompts of {prompts / count:.1f} and answers of up to {answers / count:.1f} "
        f"tokens on average\nsha256 {traffic.file_sha256}",
        highlight=False,
    )
