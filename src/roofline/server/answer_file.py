"""A file of requests answered without a server: its application, and an engine, without a port."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from roofline.common.errors import ConfigError, RooflineError
from roofline.common.files import cause_of
from roofline.common.mistaken_files import mistaken_for
from roofline.engine.facade import AsyncEngine
from roofline.server.app import create_app
from roofline.server.batches.endpoints import PATHS, RouteReply
from roofline.server.batches.lines import AnswerFiles, Failure, Line, RequestFile, Rules
from roofline.server.batches.run import LineCaller, answer_lines, salt_of
from roofline.server.context import Context
from roofline.server.keys import LOCAL
from roofline.server.limits import Limits
from roofline.server.options import ServeOptions
from roofline.server.serve import adapters_of, make_engine
from roofline.server.text_side import TextSide, load_text

NO_DEADLINES = Limits(first_token_seconds=0, total_seconds=0)


@dataclass(frozen=True)
class Job:
    """What is answered, and where the answers go.

    errors: the file of lines that were refused or failed; None: they stand among the answers. at_once: lines that are
    computed at a time.
    """

    requests: Path
    answers: Path
    errors: Path | None
    at_once: int


@dataclass(frozen=True)
class JobProgress:
    """How far a job is: lines with an answer, those of them that an earlier run wrote, errors among them, and all."""

    done: int
    before: int
    errors: int
    total: int


def answer_file(options: ServeOptions, job: Job, report: Callable[[JobProgress], None]) -> JobProgress:
    """Answer each line that has no answer yet, as a server with these options would; answers are written in the order
    in which they are complete. Returns how far the job is then: all of it.

    Raises:
        ConfigError: lines that are no requests, before anything is loaded; files that cannot be used.
        RooflineError: the model cannot be loaded, the engine is gone, or the disk is full. What was answered stays in
            the files.
    """
    rules = Rules(PATHS, NO_DEADLINES)
    if not job.requests.is_file():
        raise ConfigError(f"{job.requests}: there is no such file; requests are read from a file, twice")
    if mistake := mistaken_for(job.requests):
        raise ConfigError(f"{job.requests}: {mistake}")
    requests = RequestFile.scan(job.requests, rules)
    if requests.problems:
        listed = "\n".join(f"  line {problem.line}: {problem.message}" for problem in requests.problems if problem.line)
        if not listed:
            raise ConfigError(f"{job.requests}: {requests.problems[0].message}")
        raise ConfigError(f"{job.requests}: nothing was computed, since lines are no requests of a batch:\n{listed}")
    engine = make_engine(options)
    engine.launch()
    text = load_text(options.model, options.load.backend, options.reply_format)
    with asyncio.Runner() as runner:
        return runner.run(_answer_all(options, requests, job, report, engine, text))


async def _answer_all(
    options: ServeOptions,
    requests: RequestFile,
    job: Job,
    report: Callable[[JobProgress], None],
    engine: AsyncEngine,
    text: TextSide,
) -> JobProgress:
    adapters = adapters_of(options, engine)
    try:
        loaded = await engine.start()
        await asyncio.to_thread(text.complete)
        await adapters.load_first()
        context = Context(
            engine,
            text,
            options.names[0],
            int(time.time()),
            aliases=options.names[1:],
            limits=NO_DEADLINES,
            page=False,
            pooling=options.embedding_pooling,
            adapters=adapters,
        )
        named = (f"{adapter.name}={adapter.info.digest}" for adapter in adapters.all)
        fingerprint = " ".join((loaded.fingerprint, *named))
        with _writing(job.answers):
            answers = AnswerFiles(requests, job.answers, job.errors, salt_of(context, fingerprint, requests.urls))
        try:
            return await _answer_rest(context, requests, answers, job, report)
        finally:
            answers.close()
    finally:
        await engine.close()


async def _answer_rest(
    context: Context, requests: RequestFile, answers: AnswerFiles, job: Job, report: Callable[[JobProgress], None]
) -> JobProgress:
    app = create_app(context)
    rules = Rules(tuple(app.state.batch_endpoints), context.limits)
    principal = replace(LOCAL, background=True)
    caller = LineCaller(app, lambda: principal)
    before = answers.completed + answers.failed

    def progress() -> JobProgress:
        return JobProgress(answers.completed + answers.failed, before, answers.failed, requests.count)

    def record(number: int, line: Line, reply: RouteReply | Failure) -> None:
        with _writing(job.answers):
            answers.write(number, line, reply)
        report(progress())

    report(progress())
    rest = requests.lines(rules, answers.answered)
    work = asyncio.create_task(answer_lines(rest, caller.answer, record, job.at_once))
    gone = asyncio.create_task(context.engine.failed())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise RooflineError(f"the engine is gone: {gone.result()}. Run the same command to go on")
        work.result()
    finally:
        for task in (work, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
    with _writing(job.answers):
        answers.sync()
    return progress()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Around the writing of answers: that it fails becomes a RooflineError with file, cause and remedy."""
    try:
        yield
    except OSError as error:
        problem = f"{error.filename or path}: answers cannot be written: {cause_of(error)}"
        raise RooflineError(f"{problem}. Those before are kept; mend that and run the same command to go on") from error
