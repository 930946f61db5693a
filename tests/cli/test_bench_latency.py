"""roofline bench latency on a tiny shape: a figure or a reason for every rung, and a record that says what they are."""

import json

import pytest

from tests.command_line import call_roofline

pytest.importorskip("roofline._native", reason="the C++ core is not built")
pytest.importorskip("transformers", reason="transformers is not installed")


TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 96,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip


def call(*words, code=0):
    result = call_roofline(["bench", "latency", *words], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.mark.slow
def test_a_grid_on_a_tiny_shape(shape, tmp_path):
    out = tmp_path / "record.json"
    grid = ["--preset", shape, "--prompt", "8", "--new", "3", "--batch", "1,2", "--repeats", "2", "--threads", "1"]
    told = call(*grid, "--rungs", "eager,flash,paged,sdpa,graphs", "--out", str(out))
    record = json.loads(out.read_text())
    assert [cell["cell"] for cell in record["cells"]] == [
        "prefill 8 x 1", "prefill 8 x 2", "decode 1+3 x 1", "decode 1+3 x 2",
    ]  # fmt: skip
    for cell in record["cells"]:
        assert list(cell["rungs"]) == ["eager", "flash", "paged"]
        assert cell["failed"] == {}
        assert cell["cell"] in told
        for name, row in cell["rungs"].items():
            assert row["first_s"] > 0
            assert len(row["ttft_s"]) == 2
            assert len(row["tpot_s"]) == (2 if cell["new"] > 1 else 0)
            assert 0 <= row["share"] < 1.02  # rounded: nearly nothing on a busy machine
            assert ("speedup" in row) == (name != "eager")
        assert cell["limit"]["seconds"] > 0
    assert record["schema"] == "bench.latency/1"
    assert record["complete"]
    assert record["model"]["name"] not in ("", shape)  # no folder of this machine
    assert shape not in out.read_text()
    assert "kernel launches" in record["rungs"]["graphs"]["missing"]
    assert "sdpa is missing: torch has no memory-efficient kernel" in told
    assert "vs eager" in told
    assert record["versions"]["transformers"]


def test_rungs_are_explained_without_running():
    told = call("--explain", "--preset", "llama-2-7b")
    for part in ("eager helps neither phase", "static helps decode", "flash helps prefill", "not here: "):
        assert part in told
    plain = json.loads(call("--explain", "--json", "--rungs", "flash+tuned"))
    assert plain["flash+tuned"]["phases"] == ["prefill", "both phases"]
    assert "AMD" in plain["flash+tuned"]["missing"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rungs", "egaer"], "did you mean 'eager'"),
        (["--batch", "1;8"], "not whole numbers"),
        (["--batch", "0"], "at least 1"),
        (["--preset", "nothing"], "no model preset"),
        (["--prompt", "100000"], "100001 tokens do not fit"),
        (["--rungs", "graphs"], "no rung runs here"),
        (["--out", "/nowhere/record.json"], "/nowhere/record.json: there is no such file or folder"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(words, said):
    assert said in call(*words, code=1)


@pytest.mark.slow
def test_a_record_that_cannot_be_written_is_printed(shape):
    grid = ["--preset", shape, "--prompt", "8", "--new", "2", "--repeats", "1", "--threads", "1", "--rungs", "eager"]
    told = call(*grid, "--out", "/dev/full", code=1)
    assert '"cell": "prefill 8 x 1"' in told
    assert told.endswith("roofline: /dev/full: the disk is full\n")
