"""roofline info: figures of shapes, files and chips, for people and for programs."""

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from roofline.common.units import human_bytes
from roofline.models.presets import presets
from tests.command_line import CommandResult, call_roofline

TERMINAL = {"FORCE_COLOR": "1", "NO_COLOR": "1"}


def run(*words: object, **env: str) -> CommandResult:
    return call_roofline(["info", *words], env=env)


def record(*words: object) -> dict:  # type: ignore[type-arg]
    result = run(*words, "--json")
    assert result.exit_code == 0, result.stderr

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(result.stdout, parse_constant=refuse)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path / "home"))


def test_a_shape_has_its_published_figures() -> None:
    report = record("llama-2-70b")
    assert report["parameters"] == report["active"] == 68_976_648_192
    assert (report["kind"], report["bytes"], report["config"]["ffn"]) == ("preset", 2 * 68_976_648_192, 28672)
    assert report["takes"]["BF16"] == 2 * 68_976_648_192
    assert report["ends"] is None, "a shape has no tokenizer"
    assert report["kv_token_bytes"]["bf16"] == 2 * 2 * 80 * 8 * 128
    assert report["kv_bytes"]["int8"] == 4096 * 2 * 80 * 8 * (128 + 4)
    assert report["ops"][:2] == ["embed", "rms_norm"]
    assert "Touvron" in report["source"]


def test_a_shape_without_attention_has_a_size_in_every_format() -> None:
    """Taps of convolutions and the rank of a scan's steps are no whole blocks: files hold them in floats."""
    report = record("mamba-130m")
    assert all(report["takes"].values()), report["takes"]
    layer = 1536 * 4 + 1536 * 16, 1536 * 48  # taps and rates in F32, what makes the steps in F16
    vectors = 24 * (768 + 1536 + 1536 + 1536) + 768  # norms, biases of the taps and of the steps, skips
    in_blocks = report["parameters"] - 24 * sum(layer) - vectors
    assert report["takes"]["Q8_0"] == in_blocks * 34 // 32 + 24 * (4 * layer[0] + 2 * layer[1]) + 4 * vectors
    assert re.search(r"a token takes +266 MFLOP *$", run("mamba-130m").stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("model", "context", "kept"),
    [
        # 12 of 24 layers read 128 tokens, 12 all; keys and values of 8 heads of 64, in 2 bytes.
        ("gpt-oss-20b", 4096, 2 * 2 * 8 * 64 * 12 * (128 + 4096)),
        ("gemma-3-4b", 8192, 2 * 2 * 4 * 256 * (29 * 1024 + 5 * 8192)),
        # Layers with a window have twice the kv heads of the others.
        ("mimo-v2-flash", 4096, 2 * 2 * 192 * (9 * 4 * 4096 + 39 * 8 * 129)),
        ("gemma-3-4b", 1024, None),  # no window leaves anything out
        ("llama-3.2-1b", 4096, None),
        ("deepseek-v2-lite", 4096, None),
    ],
)
def test_a_cache_that_others_keep_smaller_is_said_to_be(model: str, context: int, kept: int | None) -> None:
    shown = run(model, "--context", context).stdout
    if kept is None:
        assert "with a window" not in shown
    else:
        whole = record(model, "--context", context)["kv_bytes"]["bf16"]
        assert f"would take {human_bytes(kept)} in bf16 for {context:,} tokens, {whole / kept:.1f} times less" in shown
    assert "latent rows" not in shown  # of DeepSeek's on a CPU the cache holds them


@pytest.mark.slow
def test_a_large_model_is_shared_by_as_few_devices_as_hold_it() -> None:
    fit = record("preset:llama-3.1-405b", "--chip", "mi300x", "--context", "8192")["fit"]
    assert (fit["devices"], fit["fits"], fit["place"], fit["context"]) == (8, True, "MI300X", 8192)
    assert 8 * fit["weights"] == pytest.approx(811.7e9, rel=0.001)
    assert fit["memory"] == 192 << 30
    assert fit["sequences"] == fit["cache_tokens"] // 8192
    assert (fit["memory"] - fit["weights"] - fit["workspace"]) // fit["token_bytes"] // 16 * 16 == fit["cache_tokens"]
    assert fit["roofs"]["f32_flops"] is None
    decode, *_, prefill = fit["rates"]
    assert (decode["step"], decode["sequences"], decode["bound"]) == ("decode", 1, "memory")
    assert decode["tokens_per_s"] == pytest.approx(5.3e12 / (decode["weight_bytes"] + decode["kv_bytes"]))
    assert (prefill["step"], prefill["tokens"], prefill["bound"]) == ("prefill", 8192, "compute")
    assert decode["link_bytes"] > 0


def test_a_shape_that_is_published_in_fewer_bits_is_looked_at_in_these() -> None:
    """The experts of gpt-oss are published in MXFP4, the others in BF16."""
    report = record("gpt-oss-120b", "--chip", "A100 80GB")
    assert report["parameters"] == 116_829_156_672
    assert report["bytes"] == pytest.approx(65.25e9, rel=1e-4), "as the files of openai/gpt-oss-120b"
    assert report["takes"]["BF16"] == 2 * report["parameters"]
    assert (report["fit"]["devices"], report["fit"]["held_in"]) == (2, {"MXFP4": "Q8_0"})
    assert report["notes"] == ["sizes here are as published (mxfp4): 579 tensors in BF16, 108 tensors in MXFP4"]
    assert record("gpt-oss-120b", "--chip", "A100 80GB", "--dtype", "bf16")["fit"]["devices"] == 4
    told = run("gpt-oss-20b").stdout
    assert "experts in MXFP4" in told
    assert "sizes here are as published (mxfp4)" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--count", 1_000_000), "--count=1000000: at most 64 devices share a model"),
        (("--count", 60), "--count=60: so many devices cannot share smollm2-135m, which has 9 parts of 1 query heads"),
        (("--memory", "1e30"), "give a number, at least 1 and at most 65,536"),
    ],
)
def test_what_no_machine_has_is_refused_by_its_option(words: tuple[object, ...], message: str) -> None:
    result = run("preset:smollm2-135m", "--chip", "T4", *words)
    assert result.exit_code != 0
    assert message in result.stderr
    assert "tensor_parallel" not in result.stderr


LLAMA = {
    **{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500},
    **{"num_key_value_heads": 2, "intermediate_size": 384, "max_position_embeddings": 512, "rms_norm_eps": 1e-5},
}


@pytest.mark.parametrize(
    ("quantization", "forms", "note"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"E4M3", "BF16"}, "as published (fp8): "),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["mlp.down_proj", "self_attn", "lm_head"]},
            {"E4M3", "BF16"},
            "as published (fp8): 17 tensors in BF16, 4 tensors in E4M3",
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            {"BF16"},
            "quantization_config says awq: sizes here are",
        ),
        (None, {"BF16"}, None),
    ],
)
def test_a_configuration_is_looked_at_as_it_is_quantised(
    quantization: dict[str, object] | None, forms: set[str], note: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | ({} if quantization is None else {"quantization_config": quantization})))
    report = record(str(path))
    assert {row["format"] for row in report["stored"]} == forms
    assert (note is None) == (not report["notes"])
    assert note is None or note in report["notes"][0]
    assert (report["bytes"] < 2 * report["parameters"]) == ("E4M3" in forms)


def test_keys_that_nothing_reads_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"torch_dtype": "bfloat16", "attention_dropout": 0.1, "num_extra_layers": 7}))
    assert record(str(path))["notes"] == ["not read of config.json: num_extra_layers; sizes may be others"]
    assert "not read of config.json: num_extra_layers" in run(str(path)).stdout


@pytest.mark.slow
def test_what_does_not_fit_says_what_would() -> None:
    report = record("llama-2-70b", "--chip", "A100 40GB", "--count", 2)
    assert (report["fit"]["fits"], report["fit"]["rates"], report["fit"]["sequences"]) == (False, [], 0)
    assert {"Q8_0", "Q4_0"} <= set(report["other_formats"])
    assert "BF16" not in report["other_formats"]
    told = run("llama-2-70b", "--chip", "A100 40GB", "--count", 2).stdout
    assert re.search(r"room for +nothing: weights and workspace take 67\.\d GiB; would fit", told)
    quantised = record("llama-2-70b", "--chip", "A100 40GB", "--count", 2, "--dtype", "q4_k_m")
    assert quantised["fit"]["fits"]
    assert quantised["dtype"] == "Q4_K_M"


def test_each_device_has_some_columns_of_every_expert() -> None:
    report = record("mixtral-8x7b", "--chip", "A100 80GB")
    fit = report["fit"]
    assert (report["active"], report["experts"], report["top"]) == (12_879_925_248, 8, 2)
    assert (fit["devices"], fit["stages"], fit["fits"]) == (2, 1, True)
    assert 2 * fit["weights"] == pytest.approx(report["bytes"], rel=0.02)
    assert fit["token_bytes"] == report["kv_token_bytes"]["bf16"] // 2
    decode = fit["rates"][0]
    read = 2 * (report["active"] - report["embedding"]) + 4096 * report["kv_token_bytes"]["bf16"]
    assert decode["weight_bytes"] + decode["kv_bytes"] == pytest.approx(read / 2, rel=1e-3)
    assert decode["seconds"] == pytest.approx(read / 2 / 2039e9, rel=1e-3)
    assert decode["link_bytes"] > 0
    text = run("mixtral-8x7b", "--chip", "A100 80GB").stdout
    assert "--pp" not in text
    assert "experts are read as if tokens chose them evenly" in text
    assert ("no kernels" in text) == bool(fit["lacking"])


@pytest.mark.slow
def test_a_model_whose_matrices_cannot_be_shared_has_its_layers_in_stages() -> None:
    report = record("olmo-2-13b", "--chip", "RTX 4090")
    fit = report["fit"]
    assert (fit["devices"], fit["stages"], fit["fits"]) == (2, 2, True)
    assert 2 * fit["weights"] == pytest.approx(report["bytes"], rel=0.02)
    decode = fit["rates"][0]
    read = 2 * (report["active"] - report["embedding"]) + 4096 * report["kv_token_bytes"]["bf16"]
    assert decode["weight_bytes"] + decode["kv_bytes"] == pytest.approx(read, rel=1e-3)
    assert decode["seconds"] == pytest.approx(read / 1008e9, rel=1e-3)
    assert "(--pp 2)" in run("olmo-2-13b", "--chip", "RTX 4090").stdout


def test_neither_torch_nor_triton_is_needed(run_python: Callable[..., str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from roofline.cli.main import main\n"
        "print(main(['info', 'mpt-7b', '--chip', 'MI250', '--json']))"
    )
    assert run_python(code).splitlines()[-1] == "0"


def test_a_die_is_a_device() -> None:
    fit = record("llama-2-7b", "--chip", "MI250")["fit"]
    assert (fit["memory"], fit["dies"]) == (64 << 30, 2)
    assert "of which a package has 2" in run("llama-2-7b", "--chip", "mi250").stdout


def test_a_chip_without_kernels_or_figures_says_so() -> None:
    result = run("llama-2-7b", "--chip", "steam deck", "--dtype", "q4_0")
    assert "no kernels" in result.stdout
    assert "bf16 not in the table" in result.stdout
    assert "decode 1 " in result.stdout
    assert "prefill" not in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("llama-2-7b", "--chip", "mi3000x"), "did you mean 'MI300X'"),
        (("llama-2-7b", "--chip", "H100"), "say which of H100 SXM, H100 PCIe, H100 NVL"),
        (("llama-2-7b", "--chip", "toaster"), "there is no chip 'toaster'"),
        (("lama-2-7b",), "did you mean 'llama-2-7b'"),
        (("preset:lama-2-7b",), "did you mean 'llama-2-7b'"),
        (("llama-2-7b", "--count", 2), "--count is of a chip"),
        (("llama-2-7b", "--context", 5000), "trained for 4,096 positions"),
        (("smollm2-360m", "--dtype", "q4_k"), "rows must be multiples of 256"),
        (("llama-2-7b", "--dtype", "q4_2"), "there is no weight format 'q4_2'"),
        (("llama-2-7b", "--chip", "MI210", "--count", 64), "--count=64: so many devices cannot share llama-2-7b"),
        (("llama-2-7b", "--chip", "MI210", "--kv-cache-dtype", "fp8"), "do not convert 8-bit floats"),
        (("nothing/here.gguf",), "no such file"),
    ],
)
def test_what_cannot_be_told_is_one_line(words: tuple[object, ...], message: str) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("name", ["llama-3-8b", "mpt-7b"])
def test_a_terminal_gets_lines_that_it_can_show(columns: int, name: str) -> None:
    result = run(name, "--chip", "mi300x", "--count", 2, COLUMNS=str(columns), **TERMINAL)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines()
    assert max(map(len, lines)) <= columns
    assert f"{presets()[name].parameters:,}" in result.stdout
    assert ("not in 40 columns: FLOPs" in result.stdout) == (columns == 40)
    assert "\u2026" not in result.stdout


def test_colours_are_left_out_where_nobody_wants_them() -> None:
    coloured, plain = run("mpt-125m", FORCE_COLOR="1"), run("mpt-125m", **TERMINAL)
    assert "\x1b[" in coloured.stdout
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", plain.stdout)  # no colour, though bold may be


def test_a_pipe_gets_ascii_in_lines_as_long_as_they_are() -> None:
    result = run("mistral-7b-v0.1", "--chip", "RTX 4090")
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout
    assert any(line.startswith("ops") and line.rstrip().endswith("take_rows") for line in result.stdout.splitlines())


def test_a_file_is_told_beside_what_it_could_be(smollm2_path: Path) -> None:
    report = record(smollm2_path, "--context", 1024)
    assert report["parameters"] == presets()["smollm2-135m"].parameters
    assert [row["format"] for row in report["stored"]] == ["Q4_1", "Q8_0", "F32"]
    assert sum(row["bytes"] for row in report["stored"]) == report["bytes"] < smollm2_path.stat().st_size
    assert sum(row["parameters"] for row in report["stored"]) == report["parameters"]
    assert report["takes"]["Q6_K"] is None  # blocks of 256 in rows of 576
    assert report["tied"]
    assert (report["fit"]["devices"], report["fit"]["roofs"]) == (1, None)
    assert report["ends"] == [{"id": 2, "token": "<|im_end|>"}, {"id": 0, "token": "<|endoftext|>"}]
    told = run(smollm2_path).stdout
    assert "here, Q4_1" in told
    assert re.search(r"answers end at +<\|im_end\|> \(2\), <\|endoftext\|> \(0\)", told)
    assert not Path(os.environ["ROOFLINE_HOME"], "bundles").exists(), "nothing is compiled for it"
    assert "-: its rows are no whole number of the format's blocks" in told
    assert "roofline doctor measures them" in told


def test_a_model_that_is_here_is_told_and_not_the_shape_of_its_name(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roofline.weights.sources.stored_path", lambda name: smollm2_path)
    assert record("smollm2-135m")["kind"] == "gguf"
    assert record("preset:smollm2-135m")["kind"] == "preset"


def test_stored_roofs_of_this_machine_give_rates() -> None:
    pytest.importorskip("roofline._native", reason="it tells the instruction sets of this build")
    from roofline.backends.cpu.select import choose_isa, choose_threads
    from roofline.hardware import detect, roofs

    measured = roofs.Roofs(
        2e12, 1e12, 5e11, ((1 << 23, 1e11), (1 << 32, 5e10)), int(choose_threads().value), str(choose_isa().value)
    )
    roofs.store(measured, detect.detect().fingerprint)
    fit = record("mpt-125m", "--context", 512)["fit"]
    assert fit["roofs"]["f32_flops"] == 5e11
    assert fit["rates"][0]["tokens_per_s"] > fit["rates"][-1]["seconds"] > 0
    assert "measured on this machine" in run("mpt-125m").stdout


def test_a_configuration_is_enough(tmp_path: Path) -> None:
    from roofline.weights.to_hf import hf_config

    (tmp_path / "config.json").write_text(json.dumps(hf_config(dict(presets()["qwen2.5-0.5b"].config))))
    for path in (tmp_path, tmp_path / "config.json"):
        report = record(path)
        assert (report["kind"], report["parameters"]) == ("configuration", 494_032_768)


def test_heads_are_counted_as_a_cpu_stores_them(tmp_path: Path) -> None:
    from roofline.weights.to_hf import hf_config

    shape = presets()["smollm2-135m"].config
    (tmp_path / "config.json").write_text(json.dumps(hf_config({**shape, "head_dim": 20})))
    report = record(tmp_path)
    assert report["kv_token_bytes"]["bf16"] == 2 * shape["layers"] * shape["kv_heads"] * 20 * 2
    assert report["fit"]["token_bytes"] == 2 * shape["layers"] * shape["kv_heads"] * 32 * 2


@pytest.mark.slow
def test_a_bundle_is_told_as_what_it_was_compiled_from(smollm2_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("roofline._native", reason="the C++ core is not built")
    assert call_roofline(["compile", smollm2_path, "-o", tmp_path / "b"]).exit_code == 0
    bundle, file = record(tmp_path / "b"), record(smollm2_path)
    assert bundle["kind"] == "bundle"
    assert all(bundle[key] == file[key] for key in ("parameters", "stored", "takes", "kv_bytes", "token_flops"))


def test_a_file_of_another_architecture_is_told_by_its_keys(tmp_path: Path) -> None:
    config = {"model_type": "fancy", "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rwkv_version": 6}
    config |= {"num_key_value_heads": 8, "hidden_act": "silu", "hidden_size": 64, "attn_logit_softcapping": 50.0}
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 128}))
    result = run(tmp_path)
    assert (result.exit_code, result.stderr) == (1, "")
    for part in (
        "model_type 'fancy'",
        "mixtral",
        "attn_logit_softcapping = 50.0",
        "op expert_linear",
        "linear attention",
    ):
        assert part in result.stdout, part
    told = json.loads(run(tmp_path, "--json").stdout)
    assert (told["known"], told["nearest"]) == (False, "mixtral")
    assert told["ops"]["attend"] == ["num_key_value_heads", "attn_logit_softcapping", "sliding_window"]
    assert "hidden_size" not in told["new_keys"]


WRONG: tuple[object, ...] = (
    *(None, True, 0, -1, 3, 0.5, 1 << 40, (1 << 64) - 1, float("nan"), float("inf"), "", "x", [], {}, [1 << 40]),
    *({"rope_type": "x"}, {"rope_type": "yarn"}),
)


@pytest.mark.slow
def test_any_changed_configuration_of_a_family_is_told_or_refused(tmp_path: Path) -> None:
    """A sample of the keys of all families' configurations with wrong values, and without them."""
    pytest.importorskip("transformers", reason="the cases of the families are compared with it")
    from roofline.cli.models.info_report import examine, record
    from roofline.common.errors import ConfigError, UnsupportedError
    from roofline.weights.config.unfamiliar import unfamiliar
    from roofline.weights.to_hf import hf_config
    from tests.models.parity_cases import CASES

    file, told, refused, rng = tmp_path / "config.json", 0, list[str](), random.Random(0)
    goods = [hf_config(dict(case.config)) for case in CASES.values()]
    for _ in range(250):
        good = rng.choice(goods)
        key, wrong = rng.choice(sorted(good)), rng.choice((..., *WRONG))
        changed = {name: value for name, value in good.items() if name != key}
        file.write_text(json.dumps(changed if wrong is ... else changed | {key: wrong}))
        try:
            if unfamiliar(file) is None:
                record(examine(str(file), "", None, None, "", "auto"))
            told += 1
        except (ConfigError, UnsupportedError) as error:
            refused.append(str(error))
    assert told > 25
    assert len(refused) > 100
    assert max(map(len, refused)) < 3000


def test_state_of_a_sequence_is_told_beside_its_cache(tmp_path: Path) -> None:
    """Of Qwen3.5 0.8B, whose layers with state keep 16 matrices of 128 x 128 and three columns of 6,144 channels."""
    config = {"model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = run(tmp_path / "config.json")
    state = 18 * 4 * (16 * 128 * 128 + 3 * 6144)
    assert "beside it 19.3 MiB of recurrent state for each sequence, however long" in told.stdout
    assert record(tmp_path / "config.json")["state_bytes"] == state
    told = run(tmp_path / "config.json", "--chip", "H100 SXM", "--context", "4096")
    fit = record(tmp_path / "config.json", "--chip", "H100 SXM", "--context", "4096")["fit"]
    assert fit["slot_bytes"] == state
    assert fit["slots"] == 256 + 64 + 2  # a quarter more than sequences of a step, for snapshots
    assert f"{fit['slots']:,} slots of 19.3 MiB for sequences and snapshots" in told.stdout
    assert fit["sequences"] == min(fit["cache_tokens"] // 4096, fit["slots"])
