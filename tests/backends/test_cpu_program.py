"""The cpu backend on whole programs: each instruction against the reference, and equal bits however a text is cut."""

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parent))

from cpu_models import MODELS, checkpoint, executable, with_memory  # noqa: E402

from roofline.ops.batch import Segment  # noqa: E402
from roofline.weights.checkpoint import Checkpoint  # noqa: E402
from roofline.weights.random_weights import random_checkpoint  # noqa: E402

ISAS = native.isas()
FORMATS = ("Q8_0", "Q4_1", "Q4_K", "Q6_K", "BF16")  # test_cpu_kernels.py has products of all formats
MORE = ("Q4_0", "Q5_K", "F32", "F16", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "INT4", "INT8", "E4M3", "NF4")
KV_DTYPES = ("bf16", "int8")
CAUSAL = [model for model in MODELS if model != "bert"]  # of an encoder a text is one step
# What differs most; the rest of some cases: -m slow
QUICK = ("llama", "mistral", "qwen3", "heads-of-20", "mpt", "mpt-alibi", "bert")
CUTS = ((1, 64), (2, 7), (2, 16), (3, 33))  # threads, and tokens of a step
CUT = ("llama", "mpt-alibi")  # of the cases that cut texts in every way


def quick_or_slow(model: str, *case: Any) -> Any:
    """The case of a model as a parameter."""
    return pytest.param(model, *case, marks=() if model in QUICK else pytest.mark.slow)


def soak_but_quick(model: str) -> list[pytest.MarkDecorator]:
    """The mark of a slow case that only the soak run has, but for the models that differ most."""
    return [] if model in QUICK else [pytest.mark.soak]


def ids_of(count: int, seed: int = 5, vocab: int = 300) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


class Text:
    """One sequence with its own pages, computed piece by piece."""

    def __init__(self, first_page: int, count: int, seed: int) -> None:
        self.ids, self.at = ids_of(count, seed), 0
        self.pages = list(range(first_page, first_page + -(-count // 16)))

    def take(self, n: int) -> Segment:
        segment = Segment(self.ids[self.at : self.at + n], self.at, self.pages)
        self.at += len(segment.ids)
        return segment


def logits_of(model: Any, segments: list[Segment]) -> np.ndarray:
    """float32 [tokens, vocab] of every token of a step."""
    model.batch.fill(segments, range(sum(len(s.ids) for s in segments)))
    model.forward()
    return model.logits().copy()


def whole(model: Any, text: Text, chunk: int) -> np.ndarray:
    parts = []
    while text.at < len(text.ids):
        parts.append(logits_of(model, [text.take(min(chunk, 64))]))
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("model", "form", "kv_dtype"),
    [("llama", form, "bf16") for form in (*FORMATS, "MXFP4")]
    + [pytest.param("llama", form, "bf16", marks=pytest.mark.slow) for form in MORE]
    + [quick_or_slow(m, "Q4_1", "bf16") for m in MODELS if m != "llama"]
    + [pytest.param(m, "BF16", "bf16", marks=[pytest.mark.slow, *soak_but_quick(m)]) for m in MODELS if m != "llama"]
    + [pytest.param(m, "Q4_1", "int8", marks=[pytest.mark.slow, *soak_but_quick(m)]) for m in MODELS if m != "llama"]
    + [("llama", "Q4_1", "int8")],
)
def test_each_instruction_equals_the_reference(model: str, form: str, kv_dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="the reference runs on torch")
    from roofline.backends.reference.cache import ReferencePages
    from roofline.backends.reference.interpreter import Interpreter
    from roofline.ops.matmul import Q8Rows
    from roofline.ops.symbol import Q_BYTES

    source = checkpoint(model, form)
    cpu = executable(source, isa=ISAS[0], keep_values=True, kv_dtype=kv_dtype)
    program = cpu.program
    types, reference = program.types(), Interpreter(program, source.read)
    caches: dict[str, Any] = {f"{name}.0": ReferencePages(group, 64) for name, group in program.kv_groups.items()}

    def value(name: str) -> Any:
        kind, place = types[name], program.plan.places[name]  # type: ignore[union-attr]
        rows = cpu.batch.tokens if kind.leading == "tokens" else cpu.batch.rows
        start = place.offset.at(tokens=cpu.batch.tokens, rows=cpu.batch.rows)
        raw = cpu._arena.view()[start : start + rows * kind.row_bytes].copy()
        if kind.dtype in ("f32", "i32"):
            dtype = np.float32 if kind.dtype == "f32" else np.int32
            return torch.from_numpy(raw.view(dtype).reshape(rows, kind.width))
        digits = Q_BYTES[kind.dtype]
        planes, rest = np.split(raw, [digits * rows * kind.width])
        scale = np.ascontiguousarray(rest[: rows * kind.width // 32 * 4].view(np.float32).reshape(-1, rows).T)
        panel = planes.view(np.int8).reshape(digits, -1, rows, 32)  # [digits, groups, tokens, 32]
        q = np.ascontiguousarray(panel.transpose(0, 2, 1, 3)).reshape(digits, rows, kind.width)
        q = q[0] if digits == 1 else q[0].astype(np.int16) * 128 + q[1]
        return Q8Rows(torch.from_numpy(q), torch.from_numpy(scale))

    first, second = Text(0, 100, 1), Text(10, 70, 2)
    steps = [[first.take(40), second.take(64)], [first.take(1), second.take(5)], [first.take(30), second.take(1)]]
    for segments in steps:
        count = sum(len(s.ids) for s in segments)
        assert count > 2  # up to two rows stay in the threads' own buffers and cannot be read here
        logits_of(cpu, segments)
        for cache in caches.values():
            cache.begin(cpu.batch)
        b = cpu.batch
        fields = {"ids": b.ids[:count], "positions": b.positions[:count], "logit_rows": b.logit_rows[: b.rows]}
        values: dict[str, Any] = {k: torch.from_numpy(v.astype(np.int64)) for k, v in fields.items()} | caches
        for instr in program.body:
            operands = []
            for name in instr.inputs:
                queries = (i for i in program.body if i.writes_cache or i.op == "rope_queries")
                written = any(i.output.name == name for i in queries)
                known = name in fields or types[name].dtype == "cache" or written
                operands.append(values[name] if known else value(name))
            with torch.no_grad():
                results = reference.step(instr, operands)
            values |= dict(zip((v.name for v in instr.outputs), results, strict=True))
            if instr.writes_cache or instr.op == "rope_queries":
                continue  # its results are the core's own: what attend makes of them is compared
            for output, wanted in zip(instr.outputs, results, strict=True):
                got = value(output.name)
                if isinstance(wanted, Q8Rows):
                    assert torch.equal(got.q, wanted.q), instr
                    assert torch.equal(got.scale, wanted.scale), instr
                elif output.type.dtype == "i32":
                    assert torch.equal(got, wanted), instr
                else:
                    worst = float((got - wanted).abs().max() / wanted.abs().max())
                    assert worst < 1e-5, (instr, worst)


@pytest.mark.parametrize(
    ("model", "form", "kv_dtype"),
    [
        *(pytest.param(m, "Q4_1", "bf16", marks=() if m in CUT else pytest.mark.slow) for m in CAUSAL),
        *(pytest.param(m, "Q4_1", "int8", marks=[pytest.mark.slow, *soak_but_quick(m)]) for m in CAUSAL),
        *(pytest.param("llama", form, "bf16", marks=pytest.mark.slow) for form in ("BF16", "Q6_K")),
    ],
)
@pytest.mark.parametrize("all_cuts", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.soak])])
def test_bits_do_not_depend_on_chunks_threads_or_isa(model: str, form: str, kv_dtype: str, all_cuts: bool) -> None:
    source = checkpoint(model, form)
    wanted = whole(executable(source, isa=ISAS[0], threads=1, kv_dtype=kv_dtype), Text(0, 100, 7), chunk=1)
    assert np.isfinite(wanted).all()
    for place, isa in enumerate(ISAS):
        # All with the best kernels. The others, which take longer, have half of them each outside of the soak.
        for threads, chunk in CUTS if place == 0 or all_cuts else CUTS[place % 2 :: 2]:
            got = whole(executable(source, isa=isa, threads=threads, kv_dtype=kv_dtype), Text(3, 100, 7), chunk)
            assert got.tobytes() == wanted.tobytes(), (isa, threads, chunk)


# An encoder's step reads no cache of an earlier one: the default run has the other kind of cache with one length.
@pytest.mark.parametrize(
    ("count", "kv_dtype"),
    [
        *((count, "bf16") for count in (1, 17, 100)),
        (17, "int8"),
        *(pytest.param(count, "bf16", marks=pytest.mark.slow) for count in (2, 16)),
        *(pytest.param(count, "int8", marks=pytest.mark.slow) for count in (1, 2, 16, 100)),
        *(pytest.param(700, kind, marks=[pytest.mark.slow, pytest.mark.soak]) for kind in KV_DTYPES),
    ],
)
def test_bits_of_an_encoder_do_not_depend_on_company_threads_or_isa(count: int, kv_dtype: str) -> None:
    source, alone = checkpoint("bert", "Q8_0"), None
    for isa in (ISAS[0], ISAS[-1]):
        for threads in (1, 3):
            model = executable(source, isa=isa, threads=threads, tokens=900, kv_dtype=kv_dtype)
            first = logits_of(model, [Text(0, count, 7).take(count)])
            alone = first if alone is None else alone
            others = Text(44, 9, 3).take(9), Text(45, 1, 4).take(1), Text(46, 100, 5).take(100)
            got = logits_of(model, [*others[:2], Text(0, count, 7).take(count), others[2]])[10 : 10 + count]
            assert first.tobytes() == alone.tobytes()
            assert got.tobytes() == alone.tobytes()
            other = Text(0, count, 7).take(count)  # the last token is seen by the first
            changed = logits_of(model, [Segment([*other.ids[:-1], (other.ids[-1] + 1) % 300], 0, other.pages)])
            assert (changed[0] != alone[0]).any()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bits_do_not_depend_on_company(kv_dtype: str) -> None:
    model = executable(checkpoint("llama", "Q4_1"), isa=ISAS[0], kv_dtype=kv_dtype)
    alone = whole(model, Text(0, 90, 11), chunk=64)
    text, other, third = Text(20, 90, 11), Text(30, 200, 12), Text(45, 60, 13)
    got = []
    while text.at < len(text.ids):
        take = min(13, len(text.ids) - text.at)
        segments = [s for s in (other.take(17), text.take(take), third.take(1)) if s.ids]
        rows = logits_of(model, segments)
        start = len(segments[0].ids) if segments[0].first_position + len(segments[0].ids) == other.at else 0
        got.append(rows[start : start + take])
    assert np.concatenate(got).tobytes() == alone.tobytes()


@pytest.mark.parametrize("kv_dtype", ["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def test_long_contexts_split_the_same_way(kv_dtype: str) -> None:
    source = random_checkpoint({**MODELS["llama"], "layers": 1, "ffn": 128}, seed=3, form="Q8_0")
    one = executable(source, isa=ISAS[0], tokens=1024, pages=64, kv_dtype=kv_dtype)
    text = Text(0, 1010, 3)
    one.batch.fill([text.take(1009)], [1008])
    one.forward()
    last = logits_of(one, [text.take(1)])
    two = executable(source, isa=ISAS[-1], tokens=1024, pages=64, threads=1, kv_dtype=kv_dtype)
    text = Text(0, 1010, 3)
    two.batch.fill([text.take(600)], [599])
    two.forward()
    two.batch.fill([text.take(410)], [409])
    two.forward()
    assert two.logits().tobytes() == last.tobytes()


SHAPES = [
    ("llama", 64, 6, 2, None),
    ("llama", 64, 4, 4, None),
    ("llama", 128, 4, 1, None),
    ("llama", 128, 6, 2, 100),
    ("llama", 96, 6, 2, None),
    ("llama", 60, 6, 2, None),
    ("mpt-alibi", 64, 6, 2, None),
]


@functools.cache
def of_shape(model: str, head_dim: int, heads: int, kv_heads: int, window: int | None) -> Checkpoint:
    """A model whose widths are 128, once for all instruction sets."""
    shape = {"width": 128, "ffn": 128, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return with_memory(random_checkpoint({**MODELS[model], **shape, "sliding_window": window}, seed=3, form="F32"))


@functools.cache
def by_single_tokens(source: Checkpoint) -> np.ndarray:
    """float32 [650, vocab]: what the best kernels make of a text, a token a step."""
    one, text = executable(source, isa=ISAS[0], tokens=700, pages=64), Text(0, 650, 3)
    return np.concatenate([logits_of(one, [text.take(1)]) for _ in range(650)])


def many_blocks_marks(isa: str, shape: tuple[Any, ...]) -> list[pytest.MarkDecorator]:
    """The portable kernels have one way for all shapes, and take longest: the slow run has them with one."""
    in_soak = isa == "portable" and shape != SHAPES[-1]
    return [pytest.mark.slow, *[pytest.mark.soak] * in_soak]


@pytest.mark.parametrize(
    ("isa", "model", "head_dim", "heads", "kv_heads", "window"),
    [
        pytest.param(isa, *shape, marks=() if isa == ISAS[0] and isa != "portable" else many_blocks_marks(isa, shape))
        for isa in ISAS
        for shape in SHAPES
    ],
)
def test_prompts_of_many_blocks_have_the_bits_of_single_tokens(
    isa: str, model: str, head_dim: int, heads: int, kv_heads: int, window: int | None
) -> None:
    """Whole blocks of 64 keys and 24 queries together, for which an instruction set may have a way of its own."""
    source = of_shape(model, head_dim, heads, kv_heads, window)
    many, wanted = executable(source, isa=isa, tokens=700, pages=64), by_single_tokens(source)
    assert np.isfinite(wanted).all()
    for cuts in ((650,), (300, 350), (64, 64, 192, 330)):
        text = Text(20, 650, 3)
        got = np.concatenate([logits_of(many, [text.take(count)]) for count in cuts])
        assert got.tobytes() == wanted.tobytes(), cuts


@pytest.mark.parametrize(("model", "kv_dtype"), [*(("llama", kind) for kind in KV_DTYPES), ("heads-of-20", "bf16")])
def test_stale_pages_never_reach_a_result(model: str, kv_dtype: str) -> None:
    source = checkpoint(model, "Q4_1")
    clean, dirty = (executable(source, isa=ISAS[0], kv_dtype=kv_dtype) for _ in range(2))
    dirty._cache.view()[:] = 0xFF  # NaN everywhere, bf16 or scales
    for count in (1, 2, 15, 16, 17, 63, 64, 65):
        a = whole(clean, Text(0, count, 9), 64)
        b = whole(dirty, Text(0, count, 9), 64)
        assert np.isfinite(b).all()
        assert a.tobytes() == b.tobytes()
        dirty._cache.view()[:] = 0xFF


# One instruction set that is not the best of this chip, and the portable one only where there is no other.
QUICK_ISA = ISAS[min(1, len(ISAS) - 1)]


@pytest.mark.parametrize(
    "isa", [isa if isa == QUICK_ISA else pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS]
)
@pytest.mark.parametrize(
    ("model", "heads", "kv_dtype"),
    [
        ("llama", 6, "bf16"),
        ("llama", 6, "int8"),
        pytest.param("mistral", 4, "bf16", marks=pytest.mark.slow),
        pytest.param("mpt-alibi", 3, "bf16", marks=pytest.mark.slow),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("llama", 4, "bf16"), ("qwen3", 8, "bf16"))),
        pytest.param("mistral", 4, "int8", marks=pytest.mark.slow),
    ],
)
def test_verifying_gives_the_bits_of_decoding(model: str, heads: int, kv_dtype: str, isa: str) -> None:
    """Segments of 2 to 9 rows share their splits out; a row of one must equal the same position decoded alone."""
    config = {**MODELS[model], "heads": heads}
    source = random_checkpoint(config, seed=3, form="Q4_1")
    text = Text(0, 540, 3)
    plain, other = (executable(source, isa=isa, tokens=512, pages=64, kv_dtype=kv_dtype) for _ in range(2))
    text.at = 500
    for one in (plain, other):
        one.batch.fill([Segment(text.ids[:500], 0, text.pages)], [])
        one.forward()
    wanted = [logits_of(plain, [text.take(1)]) for _ in range(34)]
    text.at, company = 500, Text(40, 30, 5)
    for count in (5, 2, 8, 3, 1, 9, 4):  # over position 512, where a split ends
        at = text.at - 500
        # Rejected guesses beyond the rows lie in the same page; the next segment must not see them.
        guesses = Segment([*text.ids[text.at : text.at + count], 7, 8], text.at, text.pages)
        got = logits_of(other, [guesses, company.take(2)])
        text.at += count
        assert got[:count].tobytes() == b"".join(row.tobytes() for row in wanted[at : at + count]), count
    assert text.at > 512 + 15


def test_rows_are_kept_in_the_format_that_stands_in_too() -> None:
    """libroofline checks the tiles of those, as it cannot turn the file's blocks into them."""
    from roofline.backends.cpu.truth import check_samples, samples

    source = checkpoint("llama", "IQ4_XS")
    cpu = executable(source, isa=ISAS[0])
    checked = samples(cpu.program, cpu.layout, source)
    by_format = {sample.format: sample for sample in checked}
    assert {"IQ4_XS", "IQ4_T32"} <= by_format.keys()
    assert by_format["IQ4_XS"].address == by_format["IQ4_T32"].address
    assert all(sample.fits(cpu.layout.nbytes) for sample in checked)
    check_samples(ISAS[0], cpu.image.address, checked)
