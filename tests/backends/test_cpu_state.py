"""Models with recurrent state on the cpu backend: bits of the reference, whatever a step is made of."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
torch = pytest.importorskip("torch", reason="the reference runs on torch")

from roofline.backends.capacity import host_capacity  # noqa: E402
from roofline.backends.fit import split_on_host, split_on_product  # noqa: E402
from roofline.backends.gpu.memory.requirements import needs_of  # noqa: E402
from roofline.backends.options import LoadOptions  # noqa: E402
from roofline.common.errors import CapacityError, ConfigError  # noqa: E402
from roofline.hardware import detect  # noqa: E402
from roofline.models import registry  # noqa: E402
from roofline.ops.batch import NO_SLOT, BatchLimits, Segment, StateMove  # noqa: E402
from tests.backends.hybrid_models import MODELS, PUBLISHED, checkpoint, executable, reference  # noqa: E402

ISAS = native.isas()
EMPTY = dict.fromkeys(detect.Machine.__dataclass_fields__)


class Text:
    """A sequence with pages and a slot of its own, computed piece by piece."""

    def __init__(self, number: int, count: int = 60) -> None:
        self.ids = np.random.default_rng(number).integers(0, 200, count).tolist()
        self.at, self.slot = 0, number
        self.pages = list(range(number * 8, number * 8 + 8))

    def take(self, count: int, target: int | None = None, save_at: int = 0, save_to: int = NO_SLOT) -> Segment:
        """The next `count` tokens; target: the slot that gets the state behind them."""
        source, self.slot = self.slot if self.at else NO_SLOT, self.slot if target is None else target
        move = StateMove(source, self.slot, save_at, save_to)
        segment = Segment(self.ids[self.at : self.at + count], self.at, self.pages, state=move)
        self.at += len(segment.ids)
        return segment


def step(model: Any, *segments: Segment) -> np.ndarray:
    """float32 [tokens, vocab] of every token of a step."""
    model.batch.fill(list(segments), range(sum(len(s.ids) for s in segments)))
    model.forward()
    return model.logits().copy()


def in_chunks(model: Any, text: Text, chunk: int) -> np.ndarray:
    parts = []
    while text.at < len(text.ids):
        parts.append(step(model, text.take(chunk)))
    return np.concatenate(parts)


def soil(model: Any) -> None:
    """Fill the slots with what no result may hold."""
    model._state.view().view(np.float32)[:] = np.nan


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "F32") for name in (*MODELS, *PUBLISHED)),
        ("plain", "Q8_0"),
        ("qwen3.5", "Q8_0"),
        ("qwen3-next", "Q4_0"),
    ],
)
def test_logits_have_the_bits_of_the_reference(name: str, form: str) -> None:
    source = checkpoint(name, form)
    model, slow = executable(source, ISAS[0]), reference(source)
    soil(model)
    texts = Text(1), Text(2)
    for counts in ((9, 4), (1, 1), (3, 1)):
        segments = [text.take(count) for text, count in zip(texts, counts, strict=True)]
        got, wanted = step(model, *segments), step(slow, *segments)
        assert np.isfinite(got).all()
        assert got.tobytes() == wanted.tobytes()


CUTS = ((1, 1), (2, 7), (3, 16), (4, 33), (2, 64), (3, 1))  # threads, tokens of a chunk


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", MODELS)
def test_bits_do_not_depend_on_chunks_threads_or_isa(isa: str, name: str, half: int) -> None:
    """Half of the cuts in turns: each instruction set and each model has all of them in the quick run, not each two."""
    source = checkpoint(name, "Q8_0")
    whole = in_chunks(executable(source, ISAS[-1], threads=1), Text(0, 70), 96)
    turn = ISAS.index(isa) + list(MODELS).index(name) + half
    for threads, chunk in CUTS[turn % 2 :: 2]:
        model = executable(source, isa, threads)
        soil(model)
        got = in_chunks(model, Text(0, 70), chunk)
        assert got.tobytes() == whole.tobytes(), (threads, chunk)


def test_bits_do_not_depend_on_company_or_slots() -> None:
    source = checkpoint("plain", "Q8_0")
    model = executable(source, ISAS[0])
    soil(model)
    alone = [in_chunks(model, Text(number), 96) for number in range(4)]
    soil(model)
    texts = [Text(number) for number in range(4)]
    got: list[list[np.ndarray]] = [[] for _ in texts]
    spare, turn = [4, 5, 6, 7], 0
    while any(text.at < 60 for text in texts):
        turn += 1
        running = [n for n in (3, 1, 0, 2) if texts[n].at < 60]
        running = running[turn % len(running) :] + running[: turn % len(running)]  # in another order each time
        segments = []
        for number in running:
            text, old = texts[number], texts[number].slot
            count = (1, 1, 9, 17)[(number + turn) % 4]
            target = spare.pop(0) if turn % 3 == number % 3 else None  # sometimes into another slot
            segments.append(text.take(count, target))
            if target is not None:
                spare.append(old)
        rows = step(model, *segments)
        at = 0
        for number, segment in zip(running, segments, strict=True):
            got[number].append(rows[at : at + len(segment.ids)])
            at += len(segment.ids)
    for number, wanted in enumerate(alone):
        assert np.concatenate(got[number]).tobytes() == wanted.tobytes(), number


def test_state_saved_in_passing_serves_other_sequences() -> None:
    source = checkpoint("shifted", "Q8_0")
    model = executable(source, ISAS[0])
    soil(model)
    whole = in_chunks(model, Text(0), 96)
    for at in (1, 2, 23, 40, 59):
        soil(model)
        text = Text(0)
        assert step(model, text.take(40, save_at=min(at, 40), save_to=5)).tobytes() == whole[:40].tobytes()
        if at > 40:
            assert step(model, text.take(20, save_at=at, save_to=5)).tobytes() == whole[40:].tobytes()
        # Two that go on from there, of which neither is the one that saved it; what was saved stays as it is.
        kept = model._state.view()[5 * model.slot_bytes : 6 * model.slot_bytes]
        before = kept.copy()
        for count, target in ((60 - at, 1), (1, NO_SLOT)):
            follower = Text(0)
            follower.at, follower.slot = at, 5
            assert step(model, follower.take(count, target)).tobytes() == whole[at : at + count].tobytes(), at
        assert (kept == before).all()


def test_what_is_stored_is_what_the_reference_stores() -> None:
    source = checkpoint("plain")
    model, slow = executable(source, ISAS[0]), reference(source)
    soil(model)
    texts = Text(0), Text(1)
    for count in (11, 1, 5):
        segments = [texts[0].take(count), texts[1].take(count, save_at=texts[1].at + 1, save_to=5)]
        step(model, *segments)
        step(slow, *segments)
    (slots,) = slow._states.values()
    stored = model._state.view()[: 8 * model.slot_bytes].view(np.float32).reshape(8, -1)
    for slot in (0, 1, 5):
        assert stored[slot].tobytes() == slots.values[slot].reshape(-1).numpy().tobytes(), slot
    for slot in (2, 3, 4, 6, 7):
        assert np.isnan(stored[slot]).all(), "a slot that no step named was written"
    assert model.slot_bytes == slow.slot_bytes


def test_a_slot_that_was_copied_goes_on_as_it_was() -> None:
    model = executable(checkpoint("plain", "Q8_0"), ISAS[0])
    whole = in_chunks(model, Text(0), 96)
    soil(model)
    text = Text(0)
    step(model, text.take(20))
    (view,) = model.slot_views(0)
    assert view.nbytes == model.slot_bytes
    copy = bytes(view)
    soil(model)
    (view,) = model.slot_views(5)
    view[:] = copy
    text.slot = 5
    assert step(model, text.take(40)).tobytes() == whole[20:].tobytes()


def moved(*moves: tuple[int, int, int, int], firsts: tuple[int, ...]) -> list[Segment]:
    pages = [list(range(8 * n, 8 * n + 8)) for n in range(len(moves))]
    return [
        Segment([1, 2, 3], first, pages[n], state=StateMove(*move))
        for n, (move, first) in enumerate(zip(moves, firsts, strict=True))
    ]


@pytest.mark.parametrize(
    ("moves", "firsts", "reason"),
    [
        (((-1, 1, 0, -1), (-1, 1, 0, -1)), (0, 0), "two segments"),
        (((-1, 1, 2, 1),), (0,), "writes it twice"),
        (((-1, 1, 2, 2), (-1, 2, 0, -1)), (0, 0), "two segments"),
        (((1, 1, 0, -1), (1, 2, 0, -1)), (4, 4), "reads a slot of state that it writes"),
        (((1, 2, 6, 1),), (4,), "reads a slot of state that it writes"),
        (((-1, 1, 0, -1),), (4,), "reads no state"),
        (((1, 1, 0, -1),), (0,), "reads no state"),
        (((-1, 1, 0, 2),), (0,), "position that it does not pass"),
        (((1, 1, 4, 2),), (4,), "position that it does not pass"),
        (((1, 1, 8, 2),), (4,), "position that it does not pass"),
    ],
)
def test_steps_that_would_mix_states_are_refused(moves: Any, firsts: tuple[int, ...], reason: str) -> None:
    model = executable(checkpoint("one-head"), ISAS[0])
    segments = moved(*moves, firsts=firsts)
    model.batch.fill(segments, [0])
    with pytest.raises(ValueError, match=reason):
        model.forward()
    model.batch.fill(moved((-1, 1, 0, -1), firsts=(0,)), [0])
    model.forward()  # nothing of it is left behind


@pytest.mark.parametrize("field", ["state_in", "state_out", "save_to"])
@pytest.mark.parametrize("slot", [8, -2, 1 << 30])
def test_slots_that_there_are_not_are_refused(field: str, slot: int) -> None:
    model = executable(checkpoint("one-head"), ISAS[0])
    model.batch.fill(moved((1, 1, 5, 2), firsts=(4,)), [0])
    getattr(model.batch, field)[0] = slot
    with pytest.raises(ValueError, match="names a slot of state that there is not"):
        model.forward()


def test_hidden_states_and_logits_are_of_the_same_slots() -> None:
    source = checkpoint("plain")
    model = executable(source, ISAS[0])
    hidden = model.headless()
    soil(model)
    whole = in_chunks(model, Text(0), 96)
    soil(model)
    text = Text(0)
    hidden.batch.fill([text.take(13)], [0])
    hidden.forward()
    assert step(model, text.take(47)).tobytes() == whole[13:].tobytes()
    hidden.close()


def test_pages_are_those_of_the_layers_that_attend() -> None:
    model = executable(checkpoint("plain"), ISAS[0])
    assert model.page_bytes == 16 * 1 * 2 * 2 * 2 * 16  # tokens, layers, K and V, heads, bytes, head_dim
    assert sum(len(view) for view in model.page_views(3)) == model.page_bytes


CONFIG = MODELS["plain"]
SLOT = 4 * 3 * (3 * 160 + 4 * 16 * 24)  # bytes: floats of three layers, columns and matrices


def test_slots_take_the_bytes_of_the_pages_and_are_two_more_than_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(size: int) -> None:
        monkeypatch.setattr(detect, "detect", lambda: detect.Machine(**{**EMPTY, "memory_available": size}))

    def slots(**options: int) -> int:
        return host_capacity(LoadOptions(**options), CONFIG, "bf16").limits.state_slots

    free(1 << 30)
    token = 2 * 2 * 16 * 2  # of the one layer that attends
    assert slots(cache_tokens=8192) == 66
    assert slots(cache_tokens=65536, max_running=2) == 65536 * token // SLOT
    assert slots(max_running=3, state_slots=3) == 3
    with pytest.raises(ConfigError, match=r"state_slots=63 is not enough: .*lower max_running, which is 64"):
        slots(state_slots=63)
    free(66 * SLOT - 1)
    with pytest.raises(CapacityError, match=r"recurrent state needs .* Lower max_running or state_slots: a slot takes"):
        slots(cache_tokens=1024)
    assert slots(cache_tokens=1024, max_running=60) == 62


def test_a_fit_counts_what_a_load_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot for each sequence and two more, in the workspace; beside a larger cache as many bytes of them."""
    source = checkpoint("plain")
    config = registry.config_of(source.config)
    (part,) = split_on_host(source, config, step=(32, 5)).parts
    without = replace(part.program, state_groups={})
    assert part.needs.workspace - needs_of(without, BatchLimits(32, 5, 5, 5), extra=0).workspace == 7 * SLOT
    page = part.needs.token * 16
    for room in (0, page, 7 * SLOT, 8 * SLOT, 1 << 22):
        memory = part.needs.weights + part.needs.workspace + room
        pages = part.pages(memory)

        def taken(pages: int) -> int:
            """Bytes of pages and slots of a load with so many pages."""
            if not pages:
                return 7 * SLOT
            options = LoadOptions(cache_tokens=16 * pages, max_running=5, max_model_len=16)
            capacity = host_capacity(options, CONFIG, "bf16")
            assert capacity.limits.state_slots == part.slots(pages)
            return page * capacity.num_pages + SLOT * capacity.limits.state_slots

        monkeypatch.setattr(detect, "detect", lambda: detect.Machine(**{**EMPTY, "memory_available": 1 << 40}))
        assert taken(pages) <= room + 7 * SLOT < taken(pages + 1 + SLOT // page)  # a part of a slot may be left over


def test_devices_that_share_a_model_share_its_state() -> None:
    from roofline.hardware.chips.products import titled

    source = checkpoint("qwen3-next", ffn=128, shared_ffn=64)
    product, config = titled("H100 SXM"), registry.config_of(source.config)
    (alone,), (share,) = (split_on_product(source, config, product, count).parts for count in (1, 2))
    assert alone.slot_bytes == 2 * share.slot_bytes > 0
