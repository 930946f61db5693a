"""One LLM used by several threads, by asyncio tasks, after a fork, and after it was closed."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_fakes import check_pages, loaded_text

from roofline import LLM, SamplingParams
from roofline.common.errors import RooflineError

PROMPTS = ["abc", "helloThere", "e" * 30, "oneMore", "theLast"]


def params(index):
    return SamplingParams(temperature=0.9, seed=index, max_tokens=30, logit_bias={49: -100})


@pytest.fixture
def llm():
    with LLM(loaded_text()) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone():
    """The text of each prompt, computed by itself."""
    with LLM(loaded_text()) as llm:
        return [llm.generate(prompt, params(i))[0].text for i, prompt in enumerate(PROMPTS)]


def is_idle(llm):
    """Nothing is left over: no request, no page, no open answer."""
    while llm.engine.has_work:
        llm.engine.step()
    assert not llm.answers._open
    check_pages(llm.engine.state.cache, [])
    return llm.stats().pages_used == llm.stats().running == llm.stats().waiting == 0


def test_threads_get_what_each_would_get_alone_and_share_steps(llm, alone):
    barrier = threading.Barrier(len(PROMPTS))

    def work(index):
        barrier.wait()
        texts = [llm.generate(PROMPTS[index], params(index))[0].text for _ in range(5)]
        return [*texts, "".join(llm.stream(PROMPTS[index], params(index)))]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for index, texts in enumerate(pool.map(work, range(len(PROMPTS)))):
            assert texts == [alone[index]] * 6
    assert is_idle(llm)


def test_a_thread_that_leaves_its_stream_disturbs_no_other(llm, alone):
    def leave(index):
        for _ in range(10):
            pieces = llm.stream(PROMPTS[index], params(index))
            next(pieces)
            pieces.close()

    with ThreadPoolExecutor(4) as pool:
        leaving = [pool.submit(leave, index) for index in (0, 1)]
        staying = [pool.submit(lambda i: llm.generate(PROMPTS[i], params(i))[0].text, index) for index in (2, 3)]
        assert [future.result() for future in staying] == alone[2:4]
        for future in leaving:
            future.result()
    assert not llm.engine.has_work, "what was left is aborted, not computed to its end"
    assert is_idle(llm)


def test_a_stream_that_is_collected_in_the_middle_of_a_step_is_aborted_behind_it(llm, alone):
    abandoned = llm.stream(PROMPTS[0], params(0))
    next(abandoned)
    step = llm.engine.step

    def collecting():
        events = step()
        abandoned.close()  # as the garbage collector may
        return events

    llm.engine.step = collecting
    assert llm.generate(PROMPTS[1], params(1))[0].text == alone[1]
    llm.engine.step = step
    assert not llm.engine.has_work
    assert is_idle(llm)


def test_tasks_share_one_model(llm, alone):
    async def read(index):
        return "".join([piece async for piece in llm.astream(PROMPTS[index], params(index))])

    async def all_of_them():
        return await asyncio.gather(*map(read, range(len(PROMPTS))))

    assert asyncio.run(all_of_them()) == alone
    assert is_idle(llm)


def test_a_cancelled_task_aborts_its_request(llm, alone):
    async def read(index):
        return "".join([piece async for piece in llm.astream(PROMPTS[index], params(index))])

    async def main():
        first = asyncio.Event()

        async def endless():
            async for _ in llm.astream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True)):
                first.set()

        task = asyncio.create_task(endless())
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await read(1)

    assert asyncio.run(main()) == alone[1]
    assert not llm.engine.has_work
    assert is_idle(llm)


def test_a_task_that_is_cancelled_within_a_step_waits_for_its_end(llm, monkeypatch):
    """A generator cannot be closed while a thread runs it."""
    inside, goes_on, closed, made = threading.Event(), threading.Event(), [], []

    def stream(*_, **__):
        made.append(pieces())  # as long as somebody has a generator nothing but `close` ends it
        return made[0]

    def pieces():
        try:
            yield "a"
            inside.set()
            assert goes_on.wait(10)
            yield "b"
        finally:
            closed.append(True)

    monkeypatch.setattr(llm, "stream", stream)

    async def main():
        async def read():
            async for _ in llm.astream("abc"):
                pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(inside.wait, 10)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert closed == [True]


def test_closing_ends_what_another_thread_waits_for():
    llm = LLM(loaded_text())
    started, step = threading.Event(), llm.engine.step

    def slow():
        started.set()
        return [] if started.is_set() else step()  # never done by itself

    llm.engine.step = slow
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.generate, "abc", params(0))
        assert started.wait(10)
        llm.close()
        with pytest.raises(RooflineError, match="this model is closed: load it again"):
            waiting.result(10)


def test_a_closed_model_says_so_and_closing_twice_is_nothing():
    llm = LLM(loaded_text())
    half_read = llm.stream("abc", params(0))
    next(half_read)
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("abc"), lambda: next(llm.stream("abc")), lambda: list(half_read)):
        with pytest.raises(RooflineError, match="this model is closed: load it again"):
            use()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_is_refused_at_once_and_the_parent_goes_on(llm, alone):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            llm.answers._lock = None  # whatever state it was in
            llm.generate("abc", params(0))
        except RooflineError as error:
            os.write(writing, str(error).encode())
        llm.close()
        os._exit(0)
    os.close(writing)
    message = os.read(reading, 1000).decode()
    os.close(reading)
    os.waitpid(child, 0)
    assert f"was loaded in process {os.getpid()}, and this is its fork {child}" in message
    assert "load it in the process that uses it" in message
    assert llm.generate(PROMPTS[0], params(0))[0].text == alone[0]
