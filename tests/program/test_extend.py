"""The open registries: what they refuse, where passes stand, and `expand` against the op it expands."""

from dataclasses import replace

import numpy as np
import program_builders as builders
import pytest

from roofline import extend, ops
from roofline.common import extensions
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import registry as families
from roofline.ops import formats
from roofline.ops import registry as op_registry
from roofline.program import compile as passes
from roofline.program import target as targets
from roofline.program.compile import compile_program, stage_names, stages
from roofline.program.passes.expand import expand
from roofline.program.target import CPU
from roofline.program.text import parse_program, print_program

MODEL = builders.build(builders.BASE)


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries of this test's own."""
    op_registry.names()
    for module, name in (
        (op_registry, "_OPS"), (passes, "_REGISTERED"), (families, "_FAMILIES"), (families, "_FILE_KINDS"),
        (formats, "FORMATS"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    monkeypatch.setattr(extensions, "_registered", [])


def same(x):  # type: ignore[no-untyped-def]
    return x


def declare(name: str = "twice_normed"):  # type: ignore[no-untyped-def]
    def reference(x, w, eps):  # type: ignore[no-untyped-def]
        return ops.rms_norm(ops.rms_norm(x, w, eps), w, eps)

    reference.__name__ = name
    return extend.op(values=("x",), weights=("w",), infer=lambda call: call.x)(reference)


def plain_format(name: str = "Z8", number: int = 300, **options: object) -> formats.Format:
    return formats.Format(name, 32, 34, number, formats.get("Q8_0").unpack, formats.get("Q8_0").pack, **options)  # type: ignore[arg-type]


def test_duplicates_are_refused() -> None:
    declare()
    extend.register_pass("mine", same)
    extend.register_family("mine", "somewhere.mine", gguf="mine")
    extend.register_format(plain_format(packed_as="F32"))
    for again, message in (
        (lambda: declare(), "op named 'twice_normed' is already"),
        (lambda: declare("linear"), "op named 'linear' is already"),
        (lambda: extend.register_pass("mine", same), "pass named 'mine' is already"),
        (lambda: extend.register_pass("fuse", same), "pass named 'fuse' is already"),
        (lambda: extend.register_family("mine", "x"), "family named 'mine' is already"),
        (lambda: extend.register_family("other", "x", gguf="mine"), "family for gguf mine is already"),
        (lambda: extend.register_format(plain_format(number=301, packed_as="F32")), "named 'Z8' is already"),
        (lambda: extend.register_format(plain_format("Y8", packed_as="F32")), r"GGUF type 300 \(Z8\) is already"),
        (lambda: extend.register_format(plain_format("Q8_0", 301, packed_as="F32")), "named 'Q8_0' is already"),
        (lambda: extend.register_format(plain_format("Y8", 301, packed_as="Q4_0")), "needs `convert`"),
        (lambda: extend.register_format(plain_format("Y8", 301, packed_as="Z8")), "must be a format of ours"),
        (lambda: extend.register_format(plain_format("Y 8", 301, packed_as="F32")), "cannot be named"),
        (lambda: extend.register_pass("late", same, after="plan"), "cannot run after 'plan'"),
    ):
        with pytest.raises(ConfigError, match=message):
            again()
    with pytest.raises(UnsupportedError, match="Q9"):
        extend.register_format(plain_format("Y8", 301, packed_as="Q9"))
    assert [(r.kind, r.name) for r in extend.registered()] == [
        ("op", "twice_normed"), ("pass", "mine"), ("model family", "mine"), ("weight format", "Z8"),
    ]  # fmt: skip


def test_names_that_are_nearly_right_are_told() -> None:
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        op_registry.get("lineer")
    with pytest.raises(ConfigError, match="did you mean 'qwen'"):
        families.get("qwem")


def test_passes_stand_where_they_say() -> None:
    for name, after in (("b", "merge"), ("a", "trace"), ("c", "merge")):
        extend.register_pass(name, same, after=after)
    names = ("trace", "a", "narrow", "legalize", "merge", "b", "c", "fuse", "plan")
    assert stage_names() == names
    found = list(stages(MODEL.family, MODEL.cfg, MODEL.tensors, CPU))
    assert tuple(name for name, _ in found) == names
    assert dict(found)["b"] == dict(found)["merge"]


def test_a_failing_pass_is_named() -> None:
    def broken(program):  # type: ignore[no-untyped-def]
        raise KeyError("x7")

    def lossy(program):  # type: ignore[no-untyped-def]
        return extend.without_dead(program, program.body[:-1])

    def unable(program):  # type: ignore[no-untyped-def]
        raise UnsupportedError("a table", "it is round", ("a square one",))

    for run, error, message in (
        (broken, ConfigError, "^the pass 'bad' failed: KeyError: 'x7'$"),
        (lossy, ConfigError, "^the pass 'bad' failed: output x33 is never assigned$"),
        (unable, UnsupportedError, "^pass 'bad': a table .*it is round.*a square one"),
    ):
        extend.register_pass("bad", run)
        with pytest.raises(error, match=message):
            compile_program(MODEL.family, MODEL.cfg, MODEL.tensors, CPU)
        del passes._REGISTERED["bad"]


def test_targets_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_TARGETS", dict(targets._TARGETS))
    assert [targets.get(target.name) for target in (CPU, targets.PLAIN, targets.GPU)] == [
        CPU,
        targets.PLAIN,
        targets.GPU,
    ]
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        targets.get("plane")
    mine = replace(CPU, name="mine")
    targets.register(mine)
    assert targets.get("mine") is mine
    with pytest.raises(ConfigError, match="target named 'mine' is already"):
        targets.register(mine)


def test_a_gpu_s_arithmetic_is_exact_where_it_is_asked_for() -> None:
    fast, exact = targets.gpu("f16"), targets.gpu("bf16", exact=True, cache="e4m3fn", rows8="e4m3fn")
    assert (fast.activations, fast.float_order, fast.orders, fast.rows8) == ("f16", "any", {"attend": "any"}, "")
    assert set(fast.attend_dtypes.values()) == {"f16"}
    assert (exact.float_order, exact.rows8) == ("tile", "e4m3fn")
    assert exact.orders == {"attend": "splits256", "all_reduce": "rank"}
    assert exact.attend_dtypes == {"kv_dtype": "e4m3fn", "q_dtype": "bf16", "p_dtype": "bf16"}


def test_expand_writes_an_op_as_others_of_the_same_value() -> None:
    torch = pytest.importorskip("torch")
    from roofline.backends.reference.interpreter import Interpreter

    op = declare()

    class Family:
        check, spec, embed, block = MODEL.family.check, MODEL.family.spec, MODEL.family.embed, MODEL.family.block

        @staticmethod
        def head(cfg, w, x, batch):  # type: ignore[no-untyped-def]
            x = ops.take_rows(x, batch.logit_rows)
            return ops.linear(op(x, w.final_norm.weight, eps=cfg.norm_eps), w.head.weight)

    traced = dict(stages(Family, MODEL.cfg, MODEL.tensors, CPU))["trace"]  # type: ignore[arg-type]
    opened = expand(traced, "twice_normed", lambda x, w, eps: ops.rms_norm(ops.rms_norm(x, w, eps), w, eps))
    assert [i.op for i in opened.body][-3:] == ["rms_norm", "rms_norm", "linear"]
    assert opened.body[-2].output == traced.body[-2].output
    assert parse_program(print_program(opened)) == opened
    single = expand(traced, "twice_normed", lambda x, w, eps: ops.rms_norm(x, w, eps))
    assert [i.op for i in single.body][-2:] == ["rms_norm", "linear"], "a rule may give a single op"
    assert expand(opened, "twice_normed", lambda **_: None) is opened
    rows = {"x": torch.from_numpy(np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32))}
    before, after = Interpreter(traced, MODEL.read), Interpreter(opened, MODEL.read)
    (wanted,) = before.step(traced.body[-2], [rows["x"]])
    (half,) = after.step(opened.body[-3], [rows["x"]])
    (got,) = after.step(opened.body[-2], [half])
    assert torch.equal(got, wanted)
    for wrong in (lambda x, w, eps: x, lambda x, w, eps: ops.cast(x, "bf16"), lambda x, w, eps: (ops.scale(x, 2), x)):
        with pytest.raises(ConfigError, match="expanding twice_normed"):
            expand(traced, "twice_normed", wrong)
    assert expand(traced, "kv_write", lambda **_: None) is traced
    # Options that are none of the op's own stay behind, and an operand that is left out is None.
    seen = {}
    expand(traced, "linear", lambda **given: seen.update(given) or ops.linear(given["x"], given["w"]))
    assert (set(seen), seen["bias"], seen["x_dtype"]) == ({"x", "w", "bias", "x_dtype"}, None, "f32")


def test_an_op_without_a_way_to_the_cpu_is_refused_by_name() -> None:
    pytest.importorskip("roofline._native", reason="the cpu backend is not built")
    from roofline.backends.cpu.lower import check

    op = declare()

    class Family:
        check, spec, head, block = MODEL.family.check, MODEL.family.spec, MODEL.family.head, MODEL.family.block

        @staticmethod
        def embed(cfg, w, batch):  # type: ignore[no-untyped-def]
            return op(MODEL.family.embed(cfg, w, batch), w.final_norm.weight, eps=1e-5)

    program = compile_program(Family, MODEL.cfg, MODEL.tensors, CPU)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"op 'twice_normed'.*no pass rewrites it.*Use instead: .*linear"):
        check(program)


def test_integer_rows_that_are_gone_are_refused() -> None:
    """One norm shared by attention and MLP: decode rows are kept by each thread, and only until the next are made."""
    pytest.importorskip("roofline._native", reason="the cpu backend is not built")
    from roofline.backends.cpu.lower import check
    from roofline.models import llama

    class Family:
        check, embed, head = llama.check, llama.embed, llama.head

        @staticmethod
        def spec(cfg):  # type: ignore[no-untyped-def]
            return tuple(p for p in llama.spec(cfg) if "mlp_norm" not in p.name)

        @staticmethod
        def block(cfg, w, x, layer, batch):  # type: ignore[no-untyped-def]
            norm = w.attn_norm.weight
            attended = llama.attention(cfg, w.attn, ops.rms_norm(x, norm, cfg.norm_eps), layer, batch)
            return x + attended + llama.mlp(w.mlp, ops.rms_norm(x, norm, cfg.norm_eps))

    tensors = {name: info for name, info in MODEL.tensors.items() if "mlp_norm" not in name}
    program = compile_program(Family, MODEL.cfg, tensors, CPU)  # type: ignore[arg-type]
    check(program)

    def share(program):  # type: ignore[no-untyped-def]
        seen: dict[object, str] = {}
        source, body = {}, []
        for instr in program.body:
            instr = extend.rename(instr, source)
            key = (instr.op, instr.inputs, instr.weights, str(instr.attrs))
            if instr.op == "norm_quantize" and key in seen:
                source[instr.output.name] = seen[key]
            else:
                seen[key] = instr.output.name
                body.append(instr)
        return extend.without_dead(program, body)

    extend.register_pass("share", share, after="fuse")
    with pytest.raises(UnsupportedError, match="keeps integer rows until the next"):
        check(compile_program(Family, MODEL.cfg, tensors, CPU))  # type: ignore[arg-type]


def test_what_is_in_no_file_has_no_key(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert extensions.key() == ""
    extend.register_pass("mine", same)
    key = extensions.key()
    assert key
    assert len(key) == 64
    extensions.note("op", "other", "__main__")
    assert extensions.key() is None
