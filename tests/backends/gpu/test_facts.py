"""What is read from a compiler's text, and what the gates say of it, without a compiler."""

import struct
from dataclasses import replace
from types import SimpleNamespace

import kernel_limits
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.backends.gpu.ahead import binary_facts as facts
from roofline.backends.gpu.ahead import gates, kernel_cache
from roofline.backends.gpu.ahead.compile import Binary
from roofline.backends.gpu.signatures import Compilation
from roofline.backends.gpu.tiles import Tile
from roofline.common.errors import ConfigError
from roofline.hardware.chips import chips

TTIR = """
  %9 = tt.dot %7, %8, %acc, inputPrecision = tf32 : tensor<64x32xbf16> * tensor<32x64xbf16> -> tensor<64x64xf32> loc(#1)
  %3 = tt.dot %1, %2, %0 {x = 1 : i32} : tensor<16x16xf32> * tensor<16x16xf32> -> tensor<16x16xf32> loc(#2)
"""
TTGIR = """
  %9 = tt.dot %7, %8, %acc : tensor<64x32xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma}>> * tensor<32x64xbf16, \
#ttg.dot_op<{opIdx = 1, parent = #mma}>> -> tensor<64x64xf32, #mma> loc(#1)
  %3 = tt.dot %1, %2, %0 : tensor<16x16xf32, #ttg.dot_op<{opIdx = 0, parent = #blocked2}>> * tensor<16x16xf32, \
#ttg.dot_op<{opIdx = 1, parent = #blocked2}>> -> tensor<16x16xf32, #blocked2> loc(#2)
"""
AMDGCN = """
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[2:3], v[4:5], a[0:15]
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[2:3], v[4:5], a[0:15]
\tv_add_f32_e32 v1, v2, v3 ; v_mfma_in_a_comment
; codeLenInByte = 4772
    .agpr_count:     16
    .private_segment_fixed_size: 12
    .sgpr_count:     38
    .sgpr_spill_count: 2
    .vgpr_count:     94
    .vgpr_spill_count: 3
"""
PTXAS = """ptxas info    : Compiling entry function '_k' for 'sm_90a'
ptxas info    : Function properties for _k
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 190 registers, used 1 barriers
"""
PTX = """
\twgmma.fence.sync.aligned;
\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 0;
\t@%p7 wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 0;
\twgmma.commit_group.sync.aligned;
"""


def elf(*sections):
    """A file that has nothing but sections (name, bytes)."""
    names = b"\0" + b"\0".join(name.encode() for name, _ in sections) + b"\0.names\0"
    at, body, headers = 64 + len(names), b"", struct.pack("<64x")
    for name, content in sections:
        headers += struct.pack("<IIQQQQ24x", names.index(name.encode()), 1, 0, 0, at + len(body), len(content))
        body += content
    headers += struct.pack("<IIQQQQ24x", names.index(b".names"), 3, 0, 0, 64, len(names))
    start = struct.pack("<5s35xQ10xHHH", b"\x7fELF\x02", at + len(body), 64, len(sections) + 2, len(sections) + 1)
    return start + names + body + headers


def test_facts_of_amd():
    binary = Binary({"amdgcn": AMDGCN, "ttir": TTIR, "ttgir": TTGIR}, "", 8192, 4, "key")
    found = facts.read(binary, chips.get("gfx942"))
    assert (found.registers, found.accumulators, found.scalars) == (94, 16, 38)
    assert (found.spills, found.scalar_spills, found.stack_bytes, found.code_bytes) == (3, 2, 12, 4772)
    assert found.matrix == {"v_mfma_f32_32x32x8_bf16": 2}
    assert (found.dots, found.plain_dots) == ({"bf16": 1, "f32": 1}, {"f32": 1})


def test_facts_of_nvidia():
    cubin = elf((".text._k", b"x" * 384), (".nv.info", b"y" * 100))
    found = facts.read(
        Binary({"ptx": PTX, "cubin": cubin, "ttir": "", "ttgir": ""}, PTXAS, 0, 8, "key"), chips.get("sm_90")
    )
    assert (found.registers, found.spills, found.stack_bytes, found.code_bytes) == (190, 56, 16, 384)
    assert found.matrix == {"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16": 2}


def test_text_of_an_unknown_compiler_is_refused():
    with pytest.raises(ConfigError, match="vgpr_count"):
        facts.read(Binary({"amdgcn": "nothing", "ttir": "", "ttgir": ""}, "", 0, 4, "key"), chips.get("gfx942"))
    with pytest.raises(ConfigError, match="ELF"):
        facts.text_bytes(b"MZ" + b"\0" * 100)


INSTRUCTIONS = ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "mma.sync.aligned.m16n8k8.row.col.f32.tf32")
OTHERS = ("ldmatrix.sync.aligned.m8n8.x4", "add.f32", "wgmma.fence.sync.aligned")


@given(st.lists(st.sampled_from((*INSTRUCTIONS, *OTHERS))))
def test_every_matrix_instruction_is_counted_once(lines):
    text = "".join(f"\t{line} {{%r1, %r2}}, {{%r3}};\n" for line in lines)
    want = {name: lines.count(name) for name in INSTRUCTIONS if name in lines}
    assert facts.matrix_instructions(text, chips.get("sm_90")) == dict(sorted(want.items()))


GOOD = facts.Facts(64, 0, 30, 0, 0, 16384, 0, 1000, 4, {"v_wmma_f32_16x16x16_bf16": 8}, {"bf16": 1}, {})
FUNCTION = SimpleNamespace(
    params=[SimpleNamespace(name=name, do_not_specialize=name == "rows") for name in ("x", "rows", "width")]
)
SIGNATURE = {"x": "*bf16", "rows": "i32", "width": "i32"}
CASE = Compilation("attend", "head_dim=128", FUNCTION, SIGNATURE, {}, Tile(4, 2), dots=True, aligned=("width",))


@pytest.mark.parametrize(
    ("gate", "change"),
    [
        ("spills", {"spills": 1, "stack_bytes": 8}),
        ("stack", {"stack_bytes": 8}),
        ("local memory", {"local_bytes": 65537}),
        ("occupancy", {"registers": 257}),
        ("occupancy", {"warps": 1, "local_bytes": 65536}),  # half a wave on each SIMD
        ("dots", {"dots": {}, "matrix": {}}),
        ("matrix", {"matrix": {}, "plain_dots": {"bf16": 1}}),
        ("matrix", {"dots": {"bf16": 2}, "plain_dots": {"bf16": 1}}),
    ],
)
def test_each_gate_names_what_it_found(gate, change):
    chip = chips.get("gfx1100")
    assert gates.check(CASE, GOOD, chip) == ()
    (violation,) = gates.check(CASE, replace(GOOD, **change), chip)
    assert violation.gate == gate
    text = str(violation)
    assert all(word in text for word in ("attend [head_dim=128] on gfx1100", gate, violation.figure, violation.allowed))
    assert violation.remedy in text


def test_gates_ask_for_the_occupancy_that_the_limits_have():
    """Not more, and not so much less that a kernel without limits yet could lose half of it unnoticed."""
    least = {}
    for name, cases in kernel_limits.read().items():
        for (kernel, case), limit in cases.items():
            row = gates.row("occupancy", SimpleNamespace(kernel=kernel, case=case), chips.get(name))
            key = row["why"], row["waves"]
            least[key] = min(least.get(key, limit.waves), limit.waves)
    assert len(least) > 10
    for (why, waves), reached in least.items():
        assert waves <= reached < 2 * waves, why


def test_a_number_that_is_compiled_for_is_caught():
    (violation,) = gates.check(replace(CASE, aligned=()), GOOD, chips.get("gfx1100"))
    assert (violation.gate, "width" in violation.figure, "rows" in violation.figure) == ("specialised", True, False)


def test_float32_needs_no_matrix_instruction_where_there_is_none():
    plain = replace(GOOD, matrix={}, dots={"f32": 1}, plain_dots={"f32": 1})
    for name, chip in chips.chips().items():
        assert len(gates.check(CASE, plain, chip)) == (0 if name.startswith(("gfx11", "gfx12", "sm_")) else 1)


def test_the_cache_lies_where_it_is_told_to(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    assert kernel_cache.folder() == tmp_path / "kernels"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert kernel_cache.folder() == tmp_path / "other"
