"""roofline batch: answer a file of requests."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import LoadOptions
from roofline.cli.options import ModelOptions
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Options, option, same_option
from roofline.engine.config import EngineConfig
from roofline.server.options import ServeOptions

if TYPE_CHECKING:
    from roofline.server.answer_file import JobProgress

SOME_FAILED = 3  # the exit status where all lines have an answer, and some of them an error
PIPE_SECONDS, TERMINAL_SECONDS = 10.0, 0.1  # between two words on how far it is


@dataclass(frozen=True)
class BatchOptions(Options):
    """Where answers go, and how the server would be set that gives them."""

    output: Path | None = option(
        None, "File of the answers, in the order in which they are complete. Lines that it has are not computed again.",
        flags=("--output", "-o"),
    )  # fmt: skip
    errors: Path | None = option(None, "File of the lines that were refused or failed. Default: among the answers.")
    at_once: int | None = option(
        None, "Lines that are computed at a time. Default: twice --max-running, so that none waits for a line.",
        minimum=1, unit="lines",
    )  # fmt: skip
    served_model_name: list[str] | None = same_option(
        ServeOptions, "served_model_name", help="A name that the lines give. Default: MODEL."
    )
    tool_call_parser: str = same_option(ServeOptions, "tool_call_parser")
    reasoning_parser: str = same_option(ServeOptions, "reasoning_parser")
    pooling: str = same_option(ServeOptions, "pooling")
    data_parallel: int = same_option(ServeOptions, "data_parallel")
    adapter: list[str] | None = same_option(ServeOptions, "adapter", topic="")


def command(
    requests: Annotated[Path, Argument("File with a request in each line, as of OpenAI's Batch API.")],
    options: BatchOptions,
    models: ModelOptions,
    load: LoadOptions,
    engine: EngineConfig,
) -> int:
    """Answer each request of a file as the server would; a run that was ended goes on where it was.

    Exit status: 0 where every line has an answer with status 200, 3 where some have an error in its place, 1 where the
    run could not be begun or completed.
    """
    from roofline.cli.run.prepare import prepare
    from roofline.server.answer_file import Job, answer_file
    from roofline.server.places import check_output, check_places

    if options.output is None:
        raise ConfigError("-o is missing: name the file of the answers")
    for path in filter(None, (options.output, options.errors)):
        check_output(path)
    serve = ServeOptions(
        model=models.model,
        draft=models.draft,
        load=load,
        engine=engine,
        served_model_name=options.served_model_name,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        pooling=options.pooling,
        data_parallel=options.data_parallel,
        adapter=options.adapter,
    ).with_room_for_adapters()
    check_places(serve)
    for name in filter(None, (models.model, models.draft)):
        prepare(name, load.threads, load.isa, load.backend)
    running = engine.max_running or load.max_running or (64 if load.backend == "cpu" else 256)
    job = Job(requests, options.output, options.errors, options.at_once or 2 * running * options.data_parallel)
    meter = BatchMeter()
    try:
        end = answer_file(serve, job, meter.show)
    finally:
        meter.close()
    seconds = time.monotonic() - meter.began
    earlier = f", {end.before} of them before" if end.before else ""
    print(f"{end.total} answered{earlier}, {end.errors} with errors, in {seconds:.1f} s", file=sys.stderr)
    return SOME_FAILED if end.errors else 0


class BatchMeter:
    """How far the run is, on stderr: a line drawn over itself on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self.began = self._drawn_at = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def show(self, progress: "JobProgress") -> None:
        """Say it, unless that was just done."""
        now = time.monotonic()
        if now - self._drawn_at < (TERMINAL_SECONDS if self._terminal else PIPE_SECONDS):
            return
        self._drawn_at, new = now, progress.done - progress.before
        remaining = f", {(now - self.began) * (progress.total - progress.done) / new:.0f} s left" if new else ""
        words = f"{progress.done} of {progress.total} lines, {progress.errors} with errors{remaining}"
        if self._terminal:
            filled = "#" * (24 * progress.done // max(1, progress.total))
            sys.stderr.write(f"\r\x1b[K[{filled:.<24}] {words}")
        else:
            sys.stderr.write(words + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Take the drawn line away."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
