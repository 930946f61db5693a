"""Snapshots of recurrent state in the file of a prefix cache, beside the pages."""

import logging

import numpy as np
import pytest
from engine_fakes import KeepingFake
from state_fakes import HybridFake, StateWatched

from roofline.common.errors import UnsupportedError
from roofline.engine.cache.page_file import LEAD, PageFile
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams

PROMPT = [(7 * i) % 50 for i in range(200)]


class ArrayStates:
    """States in memory that can be copied: hash, ids consumed, and whether there are any."""

    def __init__(self, count):
        self.array = np.zeros((count, 3), np.uint64)

    def __getitem__(self, slot):
        digest, count, written = self.array[slot].tolist()
        return (digest, count) if written else None

    def __setitem__(self, slot, value):
        self.array[slot] = (*value, 1)


class KeepingHybrid(HybridFake, KeepingFake):
    slot_bytes = 24

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.states = ArrayStates(self.limits.state_slots)

    def slot_views(self, slot):
        return [memoryview(self.states.array[slot].view(np.uint8))]


def life(file, prompt=PROMPT, **sizes):
    """One engine from its start to its end: ids, tokens found."""
    watched = StateWatched(EngineConfig(cache_file=str(file)), KeepingHybrid, max_context=512, **sizes)
    watched.submit(prompt, SamplingParams(temperature=0, max_tokens=70), request_id="a")
    outputs = watched.run()
    watched.engine.close()
    return outputs["a", 0], watched.ended["a", 0].usage.cached_tokens


def test_the_next_engine_finds_pages_and_snapshots(tmp_path):
    file = tmp_path / "pages"
    first = life(file)
    assert (first[1], life(file)) == (0, (first[0], 192))
    assert life(file, [*PROMPT, *first[0]])[1] == 256, "that of the answer, too"
    assert LEAD.unpack(file.read_bytes()[: LEAD.size])[1] == 2


def test_fewer_slots_read_those_used_last(tmp_path):
    file = tmp_path / "pages"
    ids, _ = life(file)
    assert life(file, state_slots=2)[0] == ids
    assert life(file, state_slots=1) == (ids, 0), "the answer's snapshot was used last"


def test_a_damaged_snapshot_is_computed_again(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("roofline"), "propagate", True)
    file = tmp_path / "pages"
    ids, _ = life(file)
    data = bytearray(file.read_bytes())
    for behind in (1, 2):  # the last byte of each of the two records' states
        data[-32 - 1 - (behind - 1) * (24 + 64)] ^= 1
    file.write_bytes(data)
    assert life(file) == (ids, 0)
    assert "2 of 2 snapshots are damaged or missing; they are left out and computed again" in caplog.text
    assert "pages are damaged" not in caplog.text


def test_a_file_without_snapshots_is_of_no_use_and_one_with_them_not_to_others(tmp_path, caplog):
    file = tmp_path / "pages"
    plain = LocalEngine(KeepingFake(max_context=512), EngineConfig(cache_file=str(file)))
    plain.submit(PROMPT, SamplingParams(temperature=0, max_tokens=3))
    while plain.has_work:
        plain.step()
    plain.close()
    assert LEAD.unpack(file.read_bytes()[: LEAD.size])[1] == 1
    assert b"slot" not in file.read_bytes()[:400], "files of other models are what they were"
    assert life(file)[1] == 0
    assert "has format 1, this version of roofline reads 2 for such a model" in caplog.text


def test_a_backend_that_does_not_give_out_state_is_refused_by_name(tmp_path):
    class Half(HybridFake, KeepingFake):
        pass

    with pytest.raises(UnsupportedError, match="does not give out the recurrent state"):
        PageFile(tmp_path / "pages", Half())
