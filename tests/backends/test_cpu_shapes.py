"""Models whose layers keep keys of several shapes on the cpu backend: the bits of the reference in every step."""

import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
torch = pytest.importorskip("torch", reason="the reference runs on torch")

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))  # thread_ranks

from thread_ranks import Member, Threads  # noqa: E402

from roofline.backends.capacity import BY_LAYER, CacheSize, Capacity, stores_of  # noqa: E402
from roofline.backends.cpu.executable import CpuExecutable  # noqa: E402
from roofline.backends.cpu.lowered import Identity, Lowered, from_bytes, to_bytes  # noqa: E402
from roofline.backends.cpu.tuning.variants import groups  # noqa: E402
from roofline.backends.fit import split_on_host  # noqa: E402
from roofline.backends.reference.executable import ReferenceExecutable  # noqa: E402
from roofline.common.errors import ConfigError  # noqa: E402
from roofline.engine.config import EngineConfig  # noqa: E402
from roofline.engine.local import LocalEngine  # noqa: E402
from roofline.engine.params import SamplingParams  # noqa: E402
from roofline.models import registry  # noqa: E402
from roofline.ops.batch import NO_SLOT, BatchLimits, Segment, StateMove  # noqa: E402
from roofline.program import target  # noqa: E402
from roofline.program.compile import compile_program  # noqa: E402
from roofline.program.ir import Share  # noqa: E402
from roofline.weights.checkpoint import Checkpoint  # noqa: E402
from roofline.weights.random_weights import random_checkpoint  # noqa: E402
from tests.backends import hybrid_models  # noqa: E402
from tests.backends.cpu_models import packed  # noqa: E402
from tests.backends.shaped_models import MODELS, checkpoint  # noqa: E402

ISAS = native.isas()
LIMITS = BatchLimits(tokens=96, segments=8, rows=96, pages=8 * 64)
IDS = np.random.default_rng(5).integers(0, 200, 70).tolist()


def executable(source: Checkpoint, isa: str = ISAS[0], threads: int = 2, kv_dtype: str = "bf16") -> CpuExecutable:
    family, config = registry.configure(source.config)
    program = compile_program(family, config, source.tensors, target.with_cache(target.CPU, kv_dtype))
    return packed(program, source, Capacity(LIMITS, 1024, 64), isa=isa, threads=threads)


def reference(model: CpuExecutable, source: Checkpoint) -> ReferenceExecutable:
    """The same Program in the CPU's orders, on torch."""
    return ReferenceExecutable(program=model.program, read=source.read, limits=LIMITS, num_pages=64, max_context=1024)


def step(model: Any, *segments: Segment) -> np.ndarray:
    """float32 [tokens, vocab] of every token of a step."""
    model.batch.fill(list(segments), range(sum(len(s.ids) for s in segments)))
    model.forward()
    return np.array(model.logits())


def in_chunks(model: Any, chunk: int, count: int = len(IDS)) -> np.ndarray:
    pages = range(5, 5 + 8)
    return np.concatenate(
        [step(model, Segment(IDS[at : min(at + chunk, count)], at, pages)) for at in range(0, count, chunk)]
    )


@pytest.mark.parametrize(("name", "form", "kv_dtype"), [
    *((name, "F32", "bf16") for name in MODELS),
    ("sharing", "Q8_0", "bf16"),
    ("apart", "Q8_0", "int8"),
    ("sharing", "Q8_0", "int8"),
])  # fmt: skip
def test_logits_have_the_bits_of_the_reference(name: str, form: str, kv_dtype: str) -> None:
    source = checkpoint(name, form)
    model = executable(source, kv_dtype=kv_dtype)
    slow = reference(model, source)
    model._cache.view().view(np.float32)[:] = np.nan  # what no result may hold
    at = [0, 0]
    for counts in ((19, 4), (1, 1), (2, 17), (1, 3)):
        segments = [
            Segment(IDS[first : first + count], first, range(8 * number, 8 * number + 8))
            for number, (first, count) in enumerate(zip(at, counts, strict=True))
        ]
        got, wanted = step(model, *segments), step(slow, *segments)
        assert np.isfinite(got).all()
        assert got.tobytes() == wanted.tobytes()
        at = [first + count for first, count in zip(at, counts, strict=True)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["apart", "sharing", "largest"])
def test_bits_do_not_depend_on_chunks_threads_or_isa(name: str, isa: str) -> None:
    source = checkpoint(name, "Q8_0")
    wanted = in_chunks(executable(source), len(IDS))
    for threads, chunk in ((1, 1), (3, 17)):
        count = 40 if chunk == 1 else len(IDS)
        assert in_chunks(executable(source, isa, threads), chunk, count).tobytes() == wanted[:count].tobytes()


def test_pages_can_be_copied_with_all_groups() -> None:
    source = checkpoint("sharing", "Q8_0")
    model, other = executable(source), executable(source)
    first = step(model, Segment(IDS[:32], 0, [3, 9]))
    assert model.page_bytes == 16 * 2 * 2 * (2 * 2 * 16 + 1 * 32)
    for page, target_page in ((3, 1), (9, 0)):
        views = model.page_views(page)
        assert [len(view) for view in views] == [16 * 2 * 2 * 2 * 16] * 2 + [16 * 2 * 2 * 32]
        for mine, theirs in zip(views, other.page_views(target_page), strict=True):
            theirs[:] = mine
    after = step(other, Segment(IDS[32:40], 32, [1, 0, 7]))
    assert np.concatenate([first, after]).tobytes() == in_chunks(executable(source), 64, 40).tobytes()


def test_every_group_counts_where_memory_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint("sharing", "Q8_0")
    monkeypatch.setattr("roofline.backends.capacity.BY_LAYER", (*BY_LAYER, "wide"))
    assert stores_of(source.config) == ((CacheSize(2, 2, 16, 0), CacheSize(1, 1, 32, 0)), 0)
    split = split_on_host(source, registry.config_of(source.config))
    assert split.parts[0].needs.token == executable(source).page_bytes // 16


def lowered_of(name: str) -> tuple[Lowered, Identity]:
    model = executable(checkpoint(name))
    return model._model.lowered, model._model.identity


def test_the_code_of_several_attentions_is_written_and_read() -> None:
    for name, form in (("styles", 3), ("sharing", 3), ("one-source", 2)):
        lowered, identity = lowered_of(name)
        data = to_bytes(lowered, identity, native.versions())
        again, _ = from_bytes(data, native.versions())
        assert int.from_bytes(data[16:24], "little") == form
        assert (again.attentions, again.tables, again.groups) == (lowered.attentions, lowered.tables, lowered.groups)
        assert again.code.tolist() == lowered.code.tolist()
        for cut in range(len(data) // 8 * 8 - 64, 320, -8 * 997):
            with pytest.raises(ConfigError):
                from_bytes(data[:cut], native.versions())


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (1, {"group": 2}, "cannot be"),
        (1, {"group": 0}, "layers of one cache have keys of several sizes"),
        (1, {"kv_heads": 3}, "cannot be shared out"),
        (1, {"head_dim": 600}, "cannot be"),
        (1, {"value_dim": -1}, "cannot be"),
        (0, {"layers": 1}, "is a layer that is not there"),
        (1, {"head_dim": 8}, "turns more than a head has"),
    ],
)
def test_attentions_that_lie_are_refused(number: int, change: dict[str, int], said: str) -> None:
    lowered, _ = lowered_of("apart")
    kinds = list(lowered.attentions)
    kinds[number] = replace(kinds[number], **change)
    with pytest.raises(ConfigError, match=said):
        _ = replace(lowered, attentions=tuple(kinds)).checked


def test_operations_of_another_attention_are_refused() -> None:
    lowered, _ = lowered_of("styles")
    fields = [name for name, _ in native.record_fields()]
    at = sum(4 if name in ("x", "y", "residual") else 1 for name in fields[: fields.index("digits")])
    code, starts, place = lowered.code, [], 0
    size = sum(4 if name in ("x", "y", "residual") else 1 for name in fields)
    while place < len(code):
        starts.append(place)
        place += size + int(code[place + size - 1]) * len(native.piece_fields())
    attends = [s for s in starts if native.operations()[code[s]] == "attend"]
    for number, said in (
        (2, "is another attention than that of the operation before it|outside|cannot be"),
        (9, "not there"),
        (0, "not there"),
    ):
        changed = code.copy()
        changed[attends[0] + at] = number
        with pytest.raises(ConfigError, match=said):
            _ = replace(lowered, code=changed).checked


def test_attention_of_each_shape_is_tuned_by_itself() -> None:
    shapes = [group.shape for group in groups(executable(checkpoint("styles")).program) if group.kind == "attend"]
    assert shapes == ["attend 4/4x16 window 9", "attend 4/1x32", "attend 4/4x16", "attend 4/1x32 window 5"]


def test_ranks_have_the_bits_of_the_reference_s_ranks() -> None:
    source = checkpoint("sharing", "Q8_0")
    family, config = registry.configure(source.config)
    parts = [compile_program(family, config, source.tensors, target.CPU, share=Share(rank, 2)) for rank in range(2)]
    identity: Future[str] = Future()
    identity.set_result("7e57")

    def on_cpu(member: Member) -> np.ndarray:
        made = CpuExecutable.from_program(
            parts[member.rank],
            source,
            Capacity(LIMITS, 1024, 64),
            weights_hash=identity,
            isa=ISAS[0],
            threads=1,
            group=member,
        )
        return in_chunks(made, 17, 40)

    def on_torch(member: Member) -> np.ndarray:
        sizes = {"limits": LIMITS, "num_pages": 64, "max_context": 1024}
        return in_chunks(ReferenceExecutable(parts[member.rank], source.read, group=member, **sizes), 17, 40)

    found, wanted = Threads(2).run(on_cpu), Threads(2).run(on_torch)
    assert [group.kv_heads for group in parts[1].kv_groups.values()] == [1, 1]
    assert found[0].tobytes() == found[1].tobytes() == wanted[0].tobytes()


def test_a_model_of_its_hidden_states_shares_all_pages() -> None:
    source = checkpoint("sharing", "Q8_0")
    model = executable(source)
    first = step(model, Segment(IDS[:20], 0, [3, 9]))
    hidden = step(model.headless(), Segment(IDS[20:30], 20, [3, 9]))
    assert (first.shape, hidden.shape) == ((20, 200), (10, 64))
    again = executable(source).headless()
    step(again, Segment(IDS[:20], 0, [3, 9]))
    assert step(again, Segment(IDS[20:30], 20, [3, 9])).tobytes() == hidden.tobytes()


def test_a_model_without_attention_has_no_cache() -> None:
    source = random_checkpoint({**hybrid_models.BASE, "recurrent": [True] * 4}, seed=1, form="F32")
    model, slow = hybrid_models.executable(source, ISAS[0]), hybrid_models.reference(source)
    text = Segment(IDS[:9], 0, [0], state=StateMove(NO_SLOT, 1, 0, NO_SLOT))
    assert step(model, text).tobytes() == step(slow, text).tobytes()
    lowered, identity = model._model.lowered, model._model.identity
    again, _ = from_bytes(to_bytes(lowered, identity, native.versions()), native.versions())
    assert (model.page_bytes, lowered.attentions, again.attentions) == (0, (), ())
    assert stores_of(source.config) == ((), model.slot_bytes)


def test_prefixes_are_found_again_after_a_restart(tmp_path: Path) -> None:
    source = checkpoint("sharing", "Q8_0")
    prompts, greedy = (IDS[:50], IDS[10:40]), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def answers() -> tuple[list[list[int]], list[int]]:
        engine = LocalEngine(executable(source), EngineConfig(cache_file=str(tmp_path / "pages")))
        found: dict[str, list[int]] = {engine.submit(prompt, greedy): [] for prompt in prompts}
        cached = []
        while engine.has_work:
            for event in engine.step():
                found[event.request_id] += event.ids
                cached += [] if event.usage is None else [event.usage.cached_tokens]
        engine.close()
        return list(found.values()), cached

    first, again = answers(), answers()
    assert first[0] == again[0]
    assert (first[1], again[1]) == ([0, 0], [48, 16])
