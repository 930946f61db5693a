"""TunableOp's files: what is written comes back, both spellings of a shape are one, other versions' results stay."""

import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.hardware.tuning import tunableop
from roofline.hardware.tuning.tunableop import Journal, Results, Shape, TunableOpRow

PUBLISHED = """\
Validator,PT_VERSION,2.4.0
Validator,ROCM_VERSION,6.0.0.0-91-08e5094
Validator,HIPBLASLT_VERSION,0.6.0-592518e7
Validator,GCN_ARCH_NAME,gfx90a:sramecc+:xnack-
Validator,ROCBLAS_VERSION,4.0.0-88df9726-dirty
GemmTunableOp_float_NN,nn_1024_512_2048,Gemm_Hipblaslt_NN_52565,0.0653662
GemmTunableOp_BFloat16_TN,tn_4096_16_11008_ld_11008_11008_4096,Gemm_Rocblas_1216,0.033
GemmStridedBatchedTunableOp_Half_TN,tn_7_5_128_B_32_ld_128_128_7,Default
"""
VALIDATORS = {"PT_VERSION": "2.4.0", "GCN_ARCH_NAME": "gfx90a:sramecc+:xnack-"}
FIELD = st.text(st.characters(codec="utf-8", exclude_characters=",\r\n"), min_size=1, max_size=12)
NUMBER = st.integers(1, 1 << 40)
SHAPES = st.builds(
    Shape,
    st.sampled_from(["nn", "nt", "tn", "tt", "NT", "cn"]),
    NUMBER,
    NUMBER,
    NUMBER,
    st.none() | NUMBER,
    st.none() | st.tuples(NUMBER, NUMBER, NUMBER),
    st.sampled_from(["", "_rw_1_bias_None", "_rw_0_bias_BFloat16"]),
)
MS = st.none() | st.floats(0, 1e6)
LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
ROWS = st.builds(TunableOpRow, FIELD.filter(lambda f: f != "Validator"), SHAPES, FIELD, MS)
CHECKED = st.dictionaries(FIELD, LINE, max_size=4).map(lambda d: {"PT_VERSION": "2.13.0", **d})


def results(*rows, **validators):
    found = Results(VALIDATORS | validators)
    for row in rows:
        found.add(row)
    return found


def row(n=16, solution="Gemm_Rocblas_1", ms=0.5, ld=True):
    shape = Shape("tn", 4096, n, 11008)
    return TunableOpRow("GemmTunableOp_BFloat16_TN", shape.with_strides if ld else shape, solution, ms)


def test_a_published_file():
    found = tunableop.parse(PUBLISHED, "file")
    assert found.validators["GCN_ARCH_NAME"] == "gfx90a:sramecc+:xnack-"
    first, second, third = found.rows.values()
    assert (first.solution, first.ms, first.shape.ld) == ("Gemm_Hipblaslt_NN_52565", 0.0653662, None)
    assert second.shape == Shape("tn", 4096, 16, 11008, ld=(11008, 11008, 4096))
    assert second.shape.words == "[16, 11008] @ [11008, 4096]"
    assert (third.shape.batch, third.solution, third.ms) == (32, "Default", None)
    assert tunableop.to_text(found) == PUBLISHED


@given(CHECKED, st.lists(ROWS, max_size=5))
def test_what_is_written_comes_back(validators, rows):
    wanted = Results(validators)
    for each in rows:
        wanted.rows.setdefault(each.key, each)
    assert tunableop.parse(tunableop.to_text(wanted), "file") == wanted


@given(SHAPES)
def test_shapes_come_back_in_either_spelling(shape):
    assert Shape.parse(str(shape)) == shape
    assert shape.with_strides.ld is not None
    assert shape.with_strides.with_strides == shape.with_strides
    if shape.ld is None:
        assert TunableOpRow("op", shape, "a").key == TunableOpRow("op", shape.with_strides, "b").key


@given(st.text(max_size=60))
def test_anything_is_read_or_refused(text):
    """Never another error, and never as something that it is not."""
    try:
        found = tunableop.parse(text, "file")
    except ConfigError:
        return
    assert "PT_VERSION" in found.validators


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "no line 'Validator,PT_VERSION"),
        ("model: llama\n", "line 1"),
        ("Validator,PT_VERSION\n", "a name and a value"),
        ("Validator,PT_VERSION,1\nGemm,tn_1_2_3\n", "operator,shape,solution"),
        ("Validator,PT_VERSION,1\nGemm,tn_1_2,Default\n", "'tn_1_2' is no shape"),
        ("Validator,PT_VERSION,1\nGemm,tn_1_2_3,Default,soon\n", "line 2: could not convert"),
        ("Validator,PT_VERSION,1\nGemm,tn_1_2_3,Default,nan\n", "line 2: nan milliseconds"),
        ("Validator,PT_VERSION,1\nGemm,tn_1_2_3,Default,-1\n", "-1.0 milliseconds"),
        ("Validator,PT_VERSION,1\nValidator,PT_VERSION,2\n", "line 2: PT_VERSION is 2 here and 1 above"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(lines, said):
    with pytest.raises(ConfigError, match=said):
        tunableop.parse(lines, "file")


def test_a_line_that_was_cut_off_is_left_out(caplog):
    with caplog.at_level(logging.WARNING):
        found = tunableop.parse(PUBLISHED + "GemmTunableOp_float_NN,nn_8_8_8,Gemm_Rocblas_12", "file")
    assert len(found.rows) == 3
    assert "Gemm_Rocblas_12" in caplog.text


def test_of_equal_rows_torch_reads_the_first():
    found = tunableop.parse(f"Validator,PT_VERSION,1\n{row(ms=2.0)}\n{row(ms=1.0, ld=False)}\n", "file")
    assert [r.ms for r in found.rows.values()] == [2.0]


def test_the_shape_of_a_linear_layer():
    """The weight is BLAS's A, transposed; rows and outputs change places."""
    operator, shape = tunableop.gemm("BF16", rows=16, out=4096, width=11008)
    assert f"{operator},{shape}" == "GemmTunableOp_BFloat16_TN,tn_4096_16_11008_ld_11008_11008_4096"
    assert tunableop.gemm("F16", 1, 8, 32, bias=True)[0] == "GemmAndBiasTunableOp_Half_TN"
    with pytest.raises(ConfigError, match="no product of Q4_0"):
        tunableop.gemm("Q4_0", 1, 8, 32)
    twice = [(operator, shape), (operator, shape)]
    assert tunableop.untuned(twice) == f"{operator},{shape}\n"


def test_merging_keeps_the_fastest_in_either_spelling():
    merged = tunableop.merge([results(row(ms=0.5)), results(row(ms=0.3, ld=False, solution="b"), row(8, ms=None))])
    assert [(r.solution, r.ms) for r in merged.rows.values()] == [("b", 0.3), ("Gemm_Rocblas_1", None)]
    assert tunableop.merge([results(row(ms=0.5)), results(row(ms=None, solution="b"))]).rows == results(row()).rows


def test_merging_refuses_other_versions_and_says_what_differs():
    with pytest.raises(ConfigError, match=r"PT_VERSION is 2\.4\.0 and 2\.5\.0; ROCM_VERSION is missing and 6"):
        tunableop.merge([results(row()), results(row(), PT_VERSION="2.5.0", ROCM_VERSION="6")])
    with pytest.raises(ConfigError, match="no results"):
        tunableop.merge([])


@given(CHECKED, CHECKED)
@example({"A": "1"}, {"A": "1", "B": "missing"})
def test_differences_name_every_field_once(ours, theirs):
    found = tunableop.differences(ours, theirs)
    assert (not found) == (ours == theirs)
    assert len(found) == len({*ours.items()} ^ {*theirs.items()}) - sum(
        ours[name] != theirs[name] for name in ours.keys() & theirs.keys()
    )


def test_writing_merges_the_same_and_never_replaces_others(tmp_path):
    path = tmp_path / "new" / "tuned.csv"
    assert tunableop.write(results(row()), path) == path
    assert tunableop.write(results(row(8)), path) == path
    assert len(tunableop.read(path).rows) == 2
    before = path.read_bytes()
    other = tunableop.write(results(row(4), PT_VERSION="2.5.0"), path)
    assert other.parent == path.parent
    assert other.name.startswith("tuned-")
    assert path.read_bytes() == before
    assert tunableop.write(results(row(2), PT_VERSION="2.5.0"), path) == other
    assert {r.shape.n for r in tunableop.read(other).rows.values()} == {2, 4}


def test_a_file_that_is_something_else_is_not_replaced(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not results\n")
    with pytest.raises(ConfigError, match="line 1"):
        tunableop.write(results(row()), path)
    assert path.read_text() == "not results\n"
    with pytest.raises(ConfigError, match="cannot be read"):
        tunableop.read(tmp_path / "nothing.csv")


@pytest.mark.parametrize("bad", ["a,b", "a\nb", ""])
def test_a_field_that_breaks_the_line_is_refused(bad):
    with pytest.raises(ConfigError, match="cannot be a field"):
        tunableop.to_text(results(row(solution=bad)))
    with pytest.raises(ConfigError, match="would be refused by torch"):
        tunableop.to_text(Results({"ROCM_VERSION": "6"}))


def test_a_journal_has_every_row_on_disk_and_goes_on(tmp_path):
    path = tmp_path / "tuned.csv"
    journal = Journal(path, VALIDATORS)
    assert tunableop.read(path).rows == {}
    assert journal.add(row())
    assert not journal.add(row(ms=0.1, ld=False))
    assert tunableop.read(path) == results(row())
    path.write_text(path.read_text() + "GemmTunableOp_Half_TN,tn_1")  # stopped within a line
    again = Journal(path, VALIDATORS)
    assert again.results == results(row())
    assert again.add(row(8))
    assert tunableop.read(path) == results(row(), row(8))
    elsewhere = Journal(path, VALIDATORS | {"PT_VERSION": "2.5.0"})
    assert elsewhere.path != path
    assert elsewhere.results.rows == {}
