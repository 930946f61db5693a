"""Pages of the prefix cache in a file: what is found again is what was written, and nothing else is ever used."""

import asyncio
import errno
import fcntl
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from engine_fakes import FakeExecutable, KeepingFake, check_pages

from roofline.backends.options import LoadOptions
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.engine.cache import page_file
from roofline.engine.cache.paged import PagedCache, PageKeys, root_key
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.process import messages
from roofline.engine.process.messages import EngineSpec, Ready, closing_seconds
from roofline.engine.process.remote import RemoteEngine
from roofline.ops.batch import PAGE_TOKENS

PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=9)
PROMPT = [1, 2, 3, 4, 5] * 13  # four full pages
OTHER = [7, 6, 5] * 15  # two


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "pages"


@pytest.fixture(autouse=True)
def log_lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("roofline"), "propagate", True)
    caplog.set_level(logging.WARNING, "roofline")
    return caplog


def answer(path, *prompts, toy=None, salt="", close=True):
    """(ids, cached tokens) of the answer to each prompt, by an engine with this file."""
    engine = LocalEngine(toy or KeepingFake(), EngineConfig(cache_file=None if path is None else str(path)))
    answers = []
    for prompt in prompts:
        engine.submit(prompt, PARAMS, salt=salt)
        ids: list[int] = []
        while engine.has_work:
            for event in engine.step():
                assert event.error is None
                ids += event.ids
                usage = event.usage or None
        answers.append((ids, usage.cached_tokens))
    check_pages(engine.state.cache, [])
    if close:
        engine.close()
    return answers


EXPECTED = [answer(None, prompt)[0][0] for prompt in (PROMPT, OTHER)]


def test_a_prefix_is_found_after_a_restart_and_the_answer_is_the_same(path, log_lines):
    assert answer(path, PROMPT, OTHER) == [(EXPECTED[0], 0), (EXPECTED[1], 0)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert answer(path, OTHER, PROMPT) == [(EXPECTED[1], 32), (EXPECTED[0], 64)]
    assert answer(path, PROMPT, salt="another tenant") == [(EXPECTED[0], 0)]
    assert answer(path, PROMPT) == [(EXPECTED[0], 64)], "what was restored is saved again"
    assert os.listdir(path.parent) == ["pages"]
    assert not log_lines.records


def test_a_link_stays_and_the_file_behind_it_is_written(path, tmp_path):
    place = tmp_path / "disk" / "pages"
    place.parent.mkdir()
    path.symlink_to(place)
    answer(path, PROMPT)
    assert path.is_symlink()
    assert os.listdir(place.parent) == ["pages"]
    assert answer(path, PROMPT) == [(EXPECTED[0], 64)]


def test_an_engine_without_pages_leaves_the_file_alone(path):
    answer(path, PROMPT)
    before = path.read_bytes()
    toy = KeepingFake()
    toy.fingerprint = "other"
    answer(path, toy=toy)
    assert path.read_bytes() == before


def damaged(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_damaged_page_is_never_used(path, log_lines):
    answer(path, PROMPT)  # its pages are those of the records 0 to 3, in this order
    whole = path.read_bytes()
    record = KeepingFake().page_bytes + 64
    records = len(whole) % record or record  # bytes of the head, as it is shorter than a record
    first = len(whole) - (len(whole) - records) // record * record
    for number in range(4):
        for offset in (0, 31, 32, record - 33, record - 32, record - 1):  # in the key, the page, the checksum
            path.write_bytes(whole)
            damaged(path, first + number * record + offset)
            log_lines.clear()
            assert answer(path, PROMPT) == [(EXPECTED[0], number * PAGE_TOKENS)]
            assert len(log_lines.records) == 1
            assert "1 of 4 pages are damaged" in log_lines.text


def test_a_file_that_was_cut_gives_the_pages_before_the_cut(path, log_lines):
    answer(path, PROMPT)
    path.write_bytes(path.read_bytes()[:-1])
    assert answer(path, PROMPT) == [(EXPECTED[0], 48)]
    assert "1 of 4 pages are damaged or missing" in log_lines.text


def test_any_byte_of_the_head_that_differs_refuses_the_file(path, log_lines):
    answer(path, PROMPT)
    whole = path.read_bytes()
    for at in range(0, len(whole) - 4 * (KeepingFake().page_bytes + 64), 3):
        path.write_bytes(whole)
        damaged(path, at)
        log_lines.clear()
        assert answer(path, PROMPT) == [(EXPECTED[0], 0)]
        assert len(log_lines.records) == 1
        assert str(path) in log_lines.text


def test_a_record_behind_the_end_of_all_files_is_missing(path):
    """A crafted head counts pages whose records would begin there."""
    path.write_bytes(b"record")
    with path.open("rb") as stream:
        assert page_file._read_record(stream.fileno(), 1 << 70, []) is None


class Named(KeepingFake):
    """With weights that have a name."""

    weights_identity = "aa"


def test_a_file_of_something_else_is_ignored_and_the_log_says_why(path, log_lines, monkeypatch):
    answer(path, PROMPT, toy=Named())
    whole = path.read_bytes()

    def refusal(toy) -> str:
        path.write_bytes(whole)
        log_lines.clear()
        assert answer(path, PROMPT, toy=toy)[0][1] == 0
        (line,) = log_lines.messages
        assert line.startswith(f"no pages of the prefix cache were restored: {path}")
        return line

    other, settings, wide = Named(), Named(), Named()
    other.weights_identity, settings.fingerprint = "bb", "another"
    wide.page_bytes *= 2
    wide.page_views = lambda page: [*Named.page_views(wide, page), *Named.page_views(wide, page)]
    assert "is of another model" in refusal(other)
    assert "computed with other settings" in refusal(settings)
    assert "has pages of 16 tokens in 256 bytes, not 16 in 512: another format of the key-value cache" in refusal(wide)
    monkeypatch.setattr(page_file, "FORMAT", 2)
    assert "has format 1, this version of roofline reads 2" in refusal(Named())
    whole = b"something else"
    assert "is no file of a prefix cache" in refusal(Named())


def test_a_smaller_cache_takes_the_pages_that_were_used_last(path):
    answer(path, PROMPT, OTHER)
    small = KeepingFake(num_pages=5)
    assert answer(path, OTHER, toy=small) == [(EXPECTED[1], 32)]
    answer(path, OTHER, PROMPT)
    tiny = KeepingFake(num_pages=6)
    assert answer(path, PROMPT, toy=tiny) == [(EXPECTED[0], 64)], "the whole chain of the later prompt is there"
    assert path.stat().st_size < 6 * (tiny.page_bytes + 64) + 600, "and the file shrinks with the cache"


def test_a_restored_cache_evicts_in_the_order_of_the_one_before():
    def keys(number):
        return PageKeys(root_key(str(number)))

    cache, ids = PagedCache(6), list(range(2 * PAGE_TOKENS))
    for number in range(3):
        pages: list[int] = []
        assert cache.grow(pages, len(ids))
        cache.publish(keys(number), ids, pages, 0, 2)
        cache.release(pages)
    held = cache.match(keys(1), [*ids, 0])
    order = [key for key, _ in cache.findable()]
    assert order == [*keys(1).upto(ids, 2), *keys(2).upto(ids, 2), *keys(0).upto(ids, 2)]
    assert [page for _, page in cache.findable()][:2] == sorted(held)
    restored = PagedCache(6)
    restored.restore([order[0], None, *order[2:5], order[0]])
    check_pages(restored, [])
    assert restored.findable() == [(order[0], 0), *((order[page], page) for page in (2, 3, 4))]
    fresh: list[int] = []
    assert restored.grow(fresh, 3 * PAGE_TOKENS)
    assert fresh == [1, 5, 4], "what is free, then the page that was used longest ago"
    assert [key for key, _ in restored.findable()] == [order[0], *order[2:4]]


def test_a_full_disk_leaves_the_file_as_it_was_and_the_engine_ends(path, log_lines):
    answer(path, PROMPT)
    before, toy = path.read_bytes(), KeepingFake()

    def views(page):
        if toy.forwards and page == 2:  # when pages are saved, some are written by then
            raise OSError(errno.ENOSPC, "full")
        return KeepingFake.page_views(toy, page)

    toy.page_views = views
    assert answer(path, PROMPT, OTHER, toy=toy)[1] == (EXPECTED[1], 0)
    assert toy.closed
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["pages"]
    assert log_lines.messages == [f"prefix cache not saved to {path}: the disk is full"]


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(path):
    for name in ("pages.1.part", "pages.2.part", "pages.x.part", "other.3.part"):
        (path.parent / name).write_bytes(b"half")
    with (path.parent / "pages.2.part").open("rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        answer(path, PROMPT)
    assert sorted(os.listdir(path.parent)) == ["other.3.part", "pages", "pages.2.part", "pages.x.part"]


class Check:
    pending, problem = False, "the weights were changed"


class Checked(KeepingFake):
    """With weights that turned out to be other ones."""

    weights_check = Check()

    def weights_hash(self, nbytes):
        return ""

    def check_weights(self, *_):
        pass


def test_pages_of_damaged_weights_and_of_a_lost_device_are_not_saved(path, log_lines, monkeypatch):
    answer(path, PROMPT, toy=Checked())
    assert not path.exists()
    assert "its weights are not the model's" in log_lines.text
    lost = KeepingFake()
    lost.lose_at = {12}
    engine = LocalEngine(lost, EngineConfig(cache_file=str(path)))
    engine.submit(PROMPT, replace(PARAMS, max_tokens=50))
    while engine.lost is None:
        engine.step()
    engine.close()
    assert not path.exists()
    monkeypatch.setattr(Check, "problem", None)
    answer(path, PROMPT, toy=Checked())
    assert path.exists()


def test_what_cannot_have_such_a_file_refuses_it_by_name(path, tmp_path):
    config = EngineConfig(cache_file=str(path))
    with pytest.raises(UnsupportedError, match="cache_file"):
        LocalEngine(FakeExecutable(), config)
    for load in (LoadOptions(backend="gpu"), LoadOptions(backend="reference"), LoadOptions(tensor_parallel=2)):
        with pytest.raises(UnsupportedError, match="cache_file"):
            config.prepare_load(load)
        EngineConfig().prepare_load(load)
    config.prepare_load(LoadOptions())
    for wrong in ({"prefix_cache": False}, {"cache": "naive"}):
        with pytest.raises(ConfigError, match="cache_file needs prefix_cache"):
            EngineConfig(cache_file="x", **wrong)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "missing" / "pages", Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="cannot be written"):
            LocalEngine(KeepingFake(), EngineConfig(cache_file=str(place)))


def test_an_engine_process_saves_when_it_is_closed_however_long_that_takes(path, monkeypatch, fakes_everywhere):
    """Without processor time it looks like one that hangs."""
    monkeypatch.setattr(messages, "SAVED_PER_SECOND", 16)  # bytes: the toy's cache may take its time
    spec = EngineSpec(
        source="toy",
        options={"seconds_a_page": 0.3},
        config=EngineConfig(cache_file=str(path)),
        factory="engine_fakes:load_keeping_fake",
    )

    async def run() -> None:
        engine = RemoteEngine(spec, ping_seconds=0.15)
        try:
            await engine.start()
            async for _ in await engine.submit(PROMPT, PARAMS):
                pass
        finally:
            await engine.close(timeout=0.0)

    asyncio.run(run())
    assert answer(path, PROMPT) == [(EXPECTED[0], 64)]


def test_an_engine_has_as_much_time_to_close_as_its_file_may_take():
    ready = Ready("toy", 50, 512, "fake", 64, 32 << 20, 0.0, 1, True)
    spec = EngineSpec(source="toy", config=EngineConfig(cache_file="x"))
    assert closing_seconds(spec, ready, 5.0) == 69.0
    with_states = msgspec.structs.replace(ready, state_slots=8, slot_bytes=4 << 20)
    assert closing_seconds(spec, with_states, 5.0) == 70.0
    assert closing_seconds(spec, None, 5.0) == 5.0
    assert closing_seconds(msgspec.structs.replace(spec, config=EngineConfig()), ready, 5.0) == 5.0
