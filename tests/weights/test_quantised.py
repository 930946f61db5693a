"""Quantised checkpoints of Hugging Face: values bit for bit, what becomes of each method, and what is refused."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.quantised.integers import nibbles
from roofline.weights.quantised.methods import check_config
from tests.judges import judge
from tests.weights import quantised_models as models
from tests.weights.quantised_models import KINDS, Codes, Q, written

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch", reason="it writes the files")

OURS = {
    "self_attn.q_proj": "attn.q", "self_attn.k_proj": "attn.k", "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_files_bit_for_bit(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(tmp_path, kind))
    _, values = models.tensors_of(kind)
    for theirs, ours in OURS.items():
        info = checkpoint.tensors[f"layers.0.{ours}.weight"]
        assert info.format == KINDS[kind][3]
        assert checkpoint.read(info.name).size == info.nbytes
        want = values[f"model.layers.0.{theirs}.weight"]
        assert checkpoint.dequantize(info.name).tobytes() == (want + np.float32(0)).tobytes(), info.name
    assert checkpoint.tensors["embed.weight"].format == "BF16"


@pytest.mark.parametrize(
    ("kind", "said"), [("gptq act-order", "act-order"), ("gptq groups of 16", "within 32"), ("gptq 32", "")]
)
def test_what_becomes_float32_is_said(kind: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "roofline"):
        open_checkpoint(written(tmp_path, kind))
    assert ("7 of 8 matrices are kept in float32" in caplog.text) == bool(said)
    assert said in caplog.text


def test_our_values_rounded_to_16_bits_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    library = judge("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    for kind in (
        "pack-quantized",
        "pack-quantized asym",
        "pack-quantized 8 bits",
        "pack-quantized 8 bits by tensor",
        "pack-quantized 8 bits by tensor, asym",
        "pack-quantized by tensor, asym",
        "int-quantized by tensor, asym",
        "int-quantized",
        "int-quantized f16",
    ):
        checkpoint = open_checkpoint(written(tmp_path, kind))
        stored, config = models.tensors_of(kind)[0], KINDS[kind][0]
        compressor = library.BaseCompressor.get_value_from_registry(config["format"])
        group = {k: v for k, v in config["config_groups"]["group_0"]["weights"].items() if v is not None}
        scheme = QuantizationScheme(targets=["Linear"], weights=group)
        for theirs, ours in OURS.items():
            name = f"model.layers.0.{theirs}."
            own = {n.removeprefix(name): t for n, t in stored.items() if n.startswith(name)}
            want = compressor.decompress(own, scheme)["weight"]
            got = torch.from_numpy(checkpoint.dequantize(f"layers.0.{ours}.weight")).to(want.dtype)
            assert torch.equal(got, want), (kind, name)


def test_files_written_by_compressed_tensors_are_read(tmp_path: Path) -> None:
    library = judge("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    config = models.compressed("pack-quantized", 4, 32, symmetric=False)
    weights = {k: v for k, v in config["config_groups"]["group_0"]["weights"].items() if v is not None}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = library.BaseCompressor.get_value_from_registry("pack-quantized")
    stored, wanted = models.plain_tensors(np.random.default_rng(0)), {}
    for part, shape in models.SHAPES.items():
        name = f"model.layers.0.{part}."
        values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        low, high = values.view(shape[0], -1, 32).aminmax(dim=2)
        scale = ((high.clamp(min=0) - low.clamp(max=0)) / 15).bfloat16()
        zero = (-8 - low / scale).round().clamp(-8, 7).to(torch.int8)
        own = compressor.compress({"weight": values, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        stored |= {name + key: tensor for key, tensor in own.items()}
        wanted[part] = compressor.decompress(own, scheme)["weight"]
    checkpoint = open_checkpoint(models.write(tmp_path, stored, config))
    for theirs, ours in OURS.items():
        assert torch.equal(
            torch.from_numpy(checkpoint.dequantize(f"layers.0.{ours}.weight")).bfloat16(), wanted[theirs]
        )


def nf4_tensors(double: bool, dtype: str = "bfloat16", block: int = 64) -> tuple[dict[str, Any], dict[str, Any]]:
    """What bitsandbytes writes for a model (tensors), and what it dequantises them to in float32 and in `dtype`."""
    functional = judge("bitsandbytes.functional")
    stored, wanted = models.plain_tensors(np.random.default_rng(0)), {}
    for part, shape in models.SHAPES.items():
        values = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype)) / 8
        packed, state = functional.quantize_4bit(values, blocksize=block, compress_statistics=double, quant_type="nf4")
        name = f"model.layers.0.{part}.weight"
        stored[name] = packed
        stored |= {f"{name}.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
        narrow = functional.dequantize_4bit(packed, state)
        state.dtype = torch.float32
        wanted[part] = functional.dequantize_4bit(packed, state), narrow
    return stored, wanted


NF4 = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True,
    "_load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0,
    "llm_int8_skip_modules": None, "llm_int8_has_fp16_weight": False, "llm_int8_enable_fp32_cpu_offload": False,
}  # fmt: skip


@pytest.mark.parametrize(("double", "block"), [(False, 64), (True, 64)])
def test_nf4_is_bitsandbytes_bit_for_bit(double: bool, block: int, tmp_path: Path) -> None:
    stored, wanted = nf4_tensors(double, block=block)
    checkpoint = open_checkpoint(models.write(tmp_path, stored, NF4))
    for theirs, ours in OURS.items():
        name = f"layers.0.{ours}.weight"
        assert checkpoint.tensors[name].format == "NF4"
        got = torch.from_numpy(checkpoint.dequantize(name))
        wide, narrow = wanted[theirs]
        assert torch.equal(got, wide), name
        assert torch.equal(got.bfloat16(), narrow), name


def bias(value: float) -> dict[str, Any]:
    return {f"{Q}.bias": torch.full((models.WIDTH,), value).half()}


def test_biases_of_zeros_that_autogptq_writes_are_left_out(tmp_path: Path) -> None:
    assert "layers.0.attn.q.bias" not in open_checkpoint(written(tmp_path, "gptq 32", bias(0))).tensors
    with pytest.raises(ConfigError, match=r"attn\.q\.bias"):
        open_checkpoint(written(tmp_path, "gptq 32", bias(0.5)))


NAN = torch.full((4, 128), float("nan")).half()
# What the writers of these versions put into quantization_config, read in their sources: GPTQModel 7.7.0, to_dict of
# quantization/config.py and models/writer.py; AutoRound 0.16.1, compressors/base.py and export_to_autogptq, _awq;
# compressed-tensors 0.20.0, QuantizationConfig as its update_config writes it.
META = {
    "quantizer": ["gptqmodel:7.7.0"], "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05,
    "damp_auto_increment": 0.01, "static_groups": False, "true_sequential": True, "mse": 0.0, "gptaq": None,
    "act_group_aware": True, "fallback": {"strategy": "rtn", "threshold": "0.5%", "smooth": None},
    "offload_to_disk": True, "telemetry": {"device": False}, "offload_to_disk_path": "gptqmodel_x",
    "pack_impl": "cpu", "gc_mode": "interval", "wait_for_submodule_finalizers": False,
    "auto_forward_data_parallel": True, "dense_vram_strategy": "exclusive", "dense_vram_strategy_devices": None,
    "moe_vram_strategy": "exclusive", "moe_vram_strategy_devices": None, "mock_quantization": False,
    "hessian": {"chunk_size": None, "chunk_bytes": None, "staging_dtype": "float32", "dedup_shared_inputs": True},
}  # fmt: skip
SHARED = {"lm_head": False, "pack_dtype": "int32", "desc_act": False, "group_size": 32, "bits": 4, "meta": META}
TUNED = {
    "data_type": "int", "iters": 1000, "seqlen": 512, "nsamples": 512, "batch_size": 4, "lr": 0.002, "amp": False,
    "minmax_lr": 0.002, "gradient_accumulate_steps": 2, "low_gpu_mem_usage": True, "scale_dtype": "torch.bfloat16",
    "enable_minmax_tuning": False, "enable_norm_bias_tuning": True, "enable_quanted_input": False,
    "autoround_version": "0.16.1", "provider": "auto-round", "group_size": 32, "bits": 4,
    "act_bits": 8, "act_data_type": "int", "act_dynamic": True, "act_sym": True, "act_group_size": -1,
    "static_kv_dtype": "fp8", "static_kv_granularity": "tensor",
}  # fmt: skip
WRITERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPTQModel gptq": (
        "gptq sym 32",
        {**SHARED, "method": "gptq", "quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "sym": True}
        | {"activation": "w4afp8", "dynamic": {"-:lm_head": {}, r"-:model\.layers\.7\..*": {}}},
    ),
    "GPTQModel gptq_v2": (
        "gptq v2",
        {**SHARED, "method": "gptq", "quant_method": "gptq", "format": "gptq_v2", "checkpoint_format": "gptq_v2"}
        | {"sym": False},
    ),
    "GPTQModel awq": (
        "awq 32",
        {**SHARED, "method": "awq", "quant_method": "awq", "format": "gemm", "checkpoint_format": "gemm"}
        | {"zero_point": True, "version": "gemm"},
    ),
    "AutoRound gptq": (
        "gptq sym 32",
        {**TUNED, "quant_method": "gptq", "sym": True, "lm_head": False, "desc_act": False, "true_sequential": False}
        | {"damp_percent": 0.01, "block_name_to_quantize": "model.layers", "dynamic": {"-:.*lm_head.*": {}}}
        | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]},
    ),
    "AutoRound awq": (
        "awq 32",
        {**TUNED, "quant_method": "awq", "sym": False, "zero_point": True, "version": "gemm"}
        | {"modules_to_not_convert": ["lm_head"]},
    ),
    "AutoRound": (
        "gptq sym 32",
        {**TUNED, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": True}
        | {"block_name_to_quantize": "model.layers", "extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}}},
    ),
    "AutoRound by AWQ": (
        "awq 32",
        {**TUNED, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "sym": False}
        | {"block_name_to_quantize": "model.layers"},
    ),
    "compressed-tensors": (
        "pack-quantized asym",
        {**KINDS["pack-quantized asym"][0], "version": "0.20.0", "moe_sparsity_config": None, "kv_cache_scheme": None}
        | {"quantization_status": "compressed", "global_compression_ratio": None, "transform_config": {}}
        | {"sparsity_config": {}, "ignore": ["lm_head"]},
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_configurations_of_today_s_writers_are_read(writer: str, tmp_path: Path) -> None:
    kind, quantization = WRITERS[writer]
    stored, values = models.tensors_of(kind)
    read = open_checkpoint(models.write(tmp_path, stored, quantization))
    for theirs, ours in OURS.items():
        want = values[f"model.layers.0.{theirs}.weight"]
        assert np.array_equal(read.dequantize(f"layers.0.{ours}.weight"), want), theirs


BAD: list[tuple[str, dict[str, Any], dict[str, Any], Any, str]] = [
    ("gptq 32", {f"{Q}.scales": None}, {}, ConfigError, r"q_proj\.scales': is missing beside .*take a copy"),
    ("gptq 32", {f"{Q}.qzeros": None}, {}, ConfigError, r"q_proj\.qzeros': is missing"),
    ("gptq act-order", {f"{Q}.g_idx": None}, {}, ConfigError, r"q_proj\.g_idx': is missing"),
    ("gptq 32", {f"{Q}.qweight": None}, {}, ConfigError, r"q_proj\.(qzeros|scales|g_idx)': no model of ours has it"),
    ("gptq 32", {f"{Q}.scales": torch.ones(3, 128).half()}, {}, ConfigError, r"scales': is F16 of \(3, 128\), not"),
    ("gptq 32", {f"{Q}.scales": torch.ones(4, 128, dtype=torch.int32)}, {}, ConfigError, r"scales': is I32 of"),
    ("gptq 32", {f"{Q}.qweight": torch.ones(16, 128)}, {}, ConfigError, r"qweight': is F32 of \(16, 128\), not I32"),
    ("gptq 32", {f"{Q}.qweight": torch.ones(0, 128).int()}, {}, ConfigError, r"qweight': is of \(0, 128\)"),
    ("gptq 32", {f"{Q}.qweight": torch.ones(16, 120).int()}, {}, ConfigError, r"scales': is F16 of \(4, 128\)"),
    ("gptq 32", {f"{Q}.qweight": torch.ones(8).int()}, {}, ConfigError, r"qweight': is of \(8,\)"),
    ("gptq 32", {f"{Q}.g_idx": torch.full((128,), 4).int()}, {}, ConfigError, r"g_idx': has a group that is not"),
    ("gptq 32", {f"{Q}.g_idx": torch.full((128,), -1).int()}, {}, ConfigError, r"g_idx': has a group that is not"),
    ("gptq 32", {f"{Q}.g_idx": torch.zeros(128).int()}, {}, ConfigError, r"g_idx': puts inputs out of order"),
    ("gptq 32", {f"{Q}.weight": torch.ones(128, 128)}, {}, ConfigError, r"q_proj\.weight': is there beside"),
    ("gptq 32", {}, {"group_size": 80}, ConfigError, "inputs, which groups of 80"),
    ("gptq 32", {}, {"group_size": 64}, ConfigError, "scales': is F16 of"),
    ("gptq 32", {}, {"bits": 8}, ConfigError, "scales': is F16 of"),
    ("awq 32", {f"{Q}.qzeros": torch.ones(3, 16).int()}, {}, ConfigError, r"qzeros': is I32 of \(3, 16\)"),
    ("awq 32", {f"{Q}.scales": None}, {}, ConfigError, r"q_proj\.scales': is missing"),
    ("awq 32", {}, {"group_size": 80}, ConfigError, "inputs, which groups of 80"),
    ("pack-quantized", {f"{Q}.weight_shape": None}, {}, ConfigError, r"weight_shape': is missing"),
    ("pack-quantized", {f"{Q}.weight_shape": torch.tensor([128, 96])}, {}, ConfigError, r"weight_packed': is of"),
    ("pack-quantized", {f"{Q}.weight_shape": torch.tensor([-128, -128])}, {}, ConfigError, r"weight_packed': is of"),
    ("pack-quantized", {f"{Q}.weight_scale": torch.ones(128, 5)}, {}, ConfigError, r"weight_scale': is of \(128, 5\)"),
    ("pack-quantized", {f"{Q}.weight_scale": torch.ones(128, 2)}, {}, ConfigError, "no config group"),
    ("pack-quantized asym", {f"{Q}.weight_zero_point": None}, {}, ConfigError, "no config group"),
    ("int-quantized", {f"{Q}.weight_scale": None}, {}, ConfigError, r"weight_scale': is missing"),
    ("int-quantized", {f"{Q}.weight": torch.ones(128).to(torch.int8)}, {}, ConfigError, "not a matrix"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "settings", "error", "said"), BAD)
def test_files_that_are_not_whole_are_refused(
    kind: str, changes: dict[str, Any], settings: dict[str, Any], error: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        open_checkpoint(written(tmp_path, kind, changes, **settings))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gptq 32", {f"{Q}.scales": NAN}, r"q_proj\.scales': holds NaN or infinity.*take another copy"),
        ("awq 32", {f"{Q}.scales": NAN}, r"q_proj\.scales': holds NaN"),
        ("pack-quantized", {f"{Q}.weight_scale": NAN.T.contiguous()}, r"weight_scale': holds NaN"),
        ("gptq sym 32", {f"{Q}.qzeros": torch.zeros(4, 16).int()}, "other zeros than 8, and .* says sym"),
    ],
)
def test_damage_in_numbers_is_found_when_they_are_read(kind: str, changes: Any, said: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(tmp_path, kind, changes))
    with pytest.raises(ConfigError, match=said):
        checkpoint.read("layers.0.attn.q.weight")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "gptq 32") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="truncated"):
        open_checkpoint(tmp_path)


def test_a_quantised_head_beside_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    codes = Codes((models.VOCAB, models.WIDTH), np.random.default_rng(0), 32, zeros=False)
    head = {f"lm_head{end}": tensor for end, tensor in models.gptq(codes).items()}
    with pytest.raises(ConfigError, match=r"lm_head\.weight': is quantised, and tie_word_embeddings"):
        open_checkpoint(written(tmp_path, "gptq sym 32", head))


def test_tensors_without_a_configuration_are_refused(tmp_path: Path) -> None:
    models.write(tmp_path, models.tensors_of("gptq 32")[0], None)
    with pytest.raises(ConfigError, match=r"qweight': is quantised, but config\.json has no quantization_config"):
        open_checkpoint(tmp_path)


STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> Any:
    import json

    fields = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [128, 128], **changes}
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def nf4_model() -> dict[str, Any]:
    """Tensors of a model whose matrices are NF4 of any codes and scales."""
    from roofline.ops.formats.nf4 import VALUES

    stored, rng = models.plain_tensors(np.random.default_rng(0)), np.random.default_rng(1)
    for part, shape in models.SHAPES.items():
        name, count = f"model.layers.0.{part}.weight", shape[0] * shape[1]
        stored[name] = torch.from_numpy(rng.integers(0, 256, (count // 2, 1), np.uint8))
        stored[f"{name}.absmax"] = torch.from_numpy(rng.uniform(0.1, 1, count // 64).astype(np.float32))
        stored[f"{name}.quant_map"] = torch.from_numpy(VALUES.copy())
        stored[f"{name}.quant_state.bitsandbytes__nf4"] = state(shape=list(shape))
    return stored


def test_scales_of_nf4_that_are_codes_themselves(tmp_path: Path) -> None:
    """256 of them, with an outer scale for 100: three, the last of which is for fewer."""
    rng, stored = np.random.default_rng(2), nf4_model()
    codes = rng.permutation(256).astype(np.uint8)
    outer, values = rng.uniform(0.5, 2, 3).astype(np.float32), rng.uniform(-1, 1, 256).astype(np.float32)
    fields = {"nested_blocksize": 100, "nested_dtype": "float32", "nested_offset": 0.25}
    nested = {
        f"{Q}.weight.absmax": torch.from_numpy(codes),
        f"{Q}.weight.nested_absmax": torch.from_numpy(outer),
        f"{Q}.weight.nested_quant_map": torch.from_numpy(values),
        STATE: state(**fields),
    }
    scales = values[codes] * outer[np.arange(256) // 100] + np.float32(0.25)
    plain = open_checkpoint(
        models.write(tmp_path / "a", stored | {f"{Q}.weight.absmax": torch.from_numpy(scales)}, NF4)
    )
    read = open_checkpoint(models.write(tmp_path / "b", stored | nested, NF4))
    assert np.array_equal(*(each.dequantize("layers.0.attn.q.weight") for each in (plain, read)))
    wrong: list[tuple[dict[str, Any], Any, str]] = [
        ({f"{Q}.weight.nested_absmax": torch.ones(2)}, ConfigError, r"nested_absmax': is F32 of \(2,\)"),
        ({f"{Q}.weight.nested_quant_map": torch.ones(255)}, ConfigError, r"nested_quant_map': is F32 of \(255,\)"),
        ({f"{Q}.weight.absmax": torch.ones(256)}, ConfigError, "absmax': is F32"),
        ({STATE: state(**fields | {"nested_blocksize": 0})}, ConfigError, "nested_blocksize are not from 1 on"),
        ({STATE: state(**fields | {"nested_dtype": "float16"})}, UnsupportedError, "nested_dtype"),
    ]
    for changes, error, said in wrong:
        with pytest.raises(error, match=said):
            open_checkpoint(models.write(tmp_path / "c", stored | nested | changes, NF4))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({f"{Q}.weight.absmax": None}, ConfigError, r"absmax': is missing"),
        ({f"{Q}.weight.absmax": torch.ones(255)}, ConfigError, r"absmax': is F32 of \(255,\)"),
        ({f"{Q}.weight.quant_map": torch.linspace(-1, 1, 16)}, ConfigError, "other values than those of NF4"),
        ({f"{Q}.weight": torch.zeros(8191, 1, dtype=torch.uint8)}, ConfigError, "half of its elements"),
        ({STATE: state(shape=[128, 1 << 40])}, ConfigError, "shape"),
        ({STATE: state(shape=[-128, -128])}, ConfigError, "shape"),
        ({STATE: state(blocksize=0)}, ConfigError, "from 1 on"),
        ({STATE: state(blocksize=32)}, UnsupportedError, "multiples of 64"),
        ({STATE: state(blocksize=1 << 60)}, UnsupportedError, "multiples of 64"),
        ({STATE: state(quant_type="fp4")}, ConfigError, "is not nf4"),
        ({STATE: state(more=1)}, UnsupportedError, "more"),
        ({STATE: state(nested_offset=0.1)}, ConfigError, "nested_dtype"),
        ({STATE: torch.tensor(list(b"[1]"), dtype=torch.uint8)}, ConfigError, "JSON object"),
        ({STATE: torch.tensor(list(b"{"), dtype=torch.uint8)}, ConfigError, "is not JSON"),
    ],
)
def test_nf4_that_is_not_whole_is_refused(changes: Any, error: Any, said: str, tmp_path: Path) -> None:
    stored = nf4_model()
    assert open_checkpoint(models.write(tmp_path, stored, NF4)).tensors["layers.0.attn.q.weight"].format == "NF4"
    with pytest.raises(error, match=said):
        open_checkpoint(models.write(tmp_path, stored | changes, NF4))


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (models.gptq_config(32, bits=3), "bits 3.*we read 4, 8"),
        (models.gptq_config(32, bits=True), "bits True"),
        (models.gptq_config(32, bits=None), "without bits"),
        (models.gptq_config(0), "group_size 0"),
        (models.gptq_config((1 << 20) + 1), "group_size 1048577"),
        (models.gptq_config(32, checkpoint_format="marlin"), "checkpoint_format marlin"),
        (models.gptq_config(32, is_marlin_format=True), "is_marlin_format"),
        (models.gptq_config(32, format="gptq_v2"), "contradict"),
        (models.gptq_config(32, dynamic={"lm_head": {"bits": 8}}), "dynamic lm_head.*left out"),
        (models.gptq_config(32, dynamic={"-:model.layers.0.*": {}, "+:.*down.*": {"bits": 8}}), r"dynamic \+:"),
        (models.gptq_config(32, method="awq"), "method awq"),
        (models.gptq_config(32, data_type="int_asym_float_zp"), "data_type int_asym_float_zp"),
        (models.gptq_config(32, super_bits=6), "key 'super_bits'"),
        (models.awq_config(32, method="gptq"), "method gptq"),
        (WRITERS["AutoRound"][1] | {"packing_format": "auto_round:exllamav2"}, "packing_format auto_round:exllamav2"),
        (WRITERS["AutoRound"][1] | {"extra_config": {"a": {"bits": 8}}}, "extra_config a.*not quantised"),
        (WRITERS["AutoRound"][1] | {"data_type": "mx_fp"}, "data_type mx_fp"),
        (WRITERS["AutoRound by AWQ"][1] | {"sym": True}, "zero_point False"),
        (models.gptq_config(32, rotation="hadamard"), "key 'rotation'"),
        (models.awq_config(32, bits=3), "bits 3"),
        (models.awq_config(32, version="gemv"), "version gemv.*we read gemm"),
        (models.awq_config(32, zero_point=False), "zero_point"),
        (models.awq_config(32, q_group_size=64), "group_size"),
        ({**models.compressed("pack-quantized", 4, 32), "format": "marlin-24"}, "marlin-24"),
        ({**models.compressed("pack-quantized", 4, 32), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        ({**models.compressed("pack-quantized", 4, 32), "transform_config": {"u": 1}}, "transform_config"),
        ({**models.compressed("pack-quantized", 4, 32), "config_groups": {}}, "without config_groups"),
        (models.compressed("pack-quantized", 2, 32), "num_bits 2"),
        (models.compressed("pack-quantized", 4, (1 << 20) + 1), "group_size 1048577"),
        (models.compressed("pack-quantized", 4, 32, group_size=0), "group_size 0"),
        (models.compressed("pack-quantized", 4, 32, strategy="block"), "integers by block"),
        (models.compressed("pack-quantized", 4, 32, strategy="tensor_group"), "tensor_group"),
        (models.compressed("pack-quantized", 4, 32, type="float"), "read in float-quantized"),
        ({**NF4, "load_in_4bit": None, "_load_in_4bit": None}, "without load_in_4bit"),
        ({**NF4, "load_in_8bit": True}, "load_in_8bit"),
        ({**NF4, "bnb_4bit_quant_type": "fp4"}, "we read nf4"),
        ({**NF4, "bnb_4bit_quant_type": None}, "it is fp4 then"),
        ({"quant_method": "aqlm"}, "quant_method aqlm"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(quantization: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        check_config(Path("config.json"), quantization)


@pytest.mark.parametrize("group", [-1, 1, 1 << 20])
def test_sizes_of_groups_at_the_ends_are_read(group: int) -> None:
    check_config(Path("config.json"), models.gptq_config(group))
    if group > 0:
        check_config(Path("config.json"), models.compressed("pack-quantized", 4, group))


def test_codes_of_words_lie_in_their_last_dimension() -> None:
    assert nibbles(np.full((2, 1, 3), 0x76543210)).tolist() == [[[*range(8)] * 3]] * 2


def test_weights_of_mlc_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "ndarray-cache.json").write_text("{}")
    (tmp_path / "params_shard_0.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="MLC LLM"):
        open_checkpoint(tmp_path)


def test_a_zero_point_of_zero_survives_the_older_version(tmp_path: Path) -> None:
    """Version 1 stores zero - 1, so 0 borrows from the next code of the word."""
    rng, codes = np.random.default_rng(0), None
    stored = models.tensors_of("gptq 32")[0]
    codes = Codes((models.WIDTH, models.WIDTH), rng, 32)
    codes.zero[:, 1] = 0
    stored |= {Q + end: tensor for end, tensor in models.gptq(codes).items()}
    checkpoint = open_checkpoint(models.write(tmp_path, stored, KINDS["gptq 32"][0]))
    assert np.array_equal(checkpoint.dequantize("layers.0.attn.q.weight"), codes.values)
