"""Every architecture of GGUF files gives the logits of the model of transformers that the file was written from."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="what the logits are compared with runs in torch")
pytest.importorskip("transformers", reason="it is what the logits are compared with")
pytest.importorskip("gguf", reason="it writes the files")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from gguf_families import GGUF_CASES, GGUF_ENCODERS, GgufCase, as_it_is, write  # noqa: E402

from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from roofline.weights.config.to_gguf import form_of, to_gguf  # noqa: E402
from roofline.weights.families.table import ARCHITECTURES  # noqa: E402
from roofline.weights.vectors import recommended_kind  # noqa: E402
from tests.models.parity_cases import CASES, Eager, encoder_of, measure_encoder, on_cpu, theirs  # noqa: E402

IDS = np.random.default_rng(1).integers(0, 96, 80).tolist()


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    case = GGUF_CASES[name]
    model = theirs(case.config)
    source = open_checkpoint(write(tmp_path / "model.gguf", model, case))
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(Eager(source).step(IDS) - expected).max() < 2e-5
    cpu = on_cpu(source, len(IDS))
    assert cpu is None or np.abs(cpu.step(IDS) - expected).max() < 0.05


@pytest.mark.parametrize("name", ["gemma2", "smollm3", "granite", "arcee", "gpt_neox"])
def test_values_that_a_converter_would_have_changed_give_other_logits(name: str, tmp_path: Path) -> None:
    """So that the comparison above would notice a reader that changes them too, or not at all."""
    case = replace(GGUF_CASES[name], values=as_it_is)
    model = theirs(case.config)
    source = open_checkpoint(write(tmp_path / "model.gguf", model, case))
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(Eager(source).step(IDS) - expected).max() > 0.01


def test_every_architecture_has_a_case() -> None:
    elsewhere = {"qwen2", "qwen3", "qwen2moe", "qwen3moe", "gpt-oss"}  # tests/bundle/test_load.py, test_moe.py
    elsewhere |= {"qwen3vlmoe"}  # test_wrapped.py
    elsewhere |= {"hy_v3"}  # test_routed_files.py: the package does not name it
    cases = (*GGUF_CASES.values(), *GGUF_ENCODERS.values())
    assert {case.architecture for case in cases} | elsewhere == set(ARCHITECTURES)


@pytest.mark.parametrize(("name", "kind"), [("bert", "first"), ("roberta", "mean")])
def test_a_gguf_file_of_an_encoder_has_the_rows_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    case = GGUF_ENCODERS[name]
    model = encoder_of(case.config)
    source = open_checkpoint(write(tmp_path / "model.gguf", model, case))
    eager, cpu = measure_encoder(case.config, source)
    assert eager < 1e-5
    assert cpu < 0.02
    assert recommended_kind(source) == kind


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attention.causal": True}, ConfigError, r"bert\.attention\.causal"),
        ({"rope.freq_base": 1e4}, UnsupportedError, r"bert\.rope\.freq_base"),
        ({"pooling_type": 4}, UnsupportedError, r"bert\.pooling_type = 4"),
    ],
)
def test_gguf_encoders_that_we_do_not_have_are_refused(
    change: dict[str, int | float | bool], error: type[Exception], message: str, tmp_path: Path
) -> None:
    case = replace(GGUF_ENCODERS["bert"], keys={**GGUF_ENCODERS["bert"].keys, **change})
    with pytest.raises(error, match=message):
        recommended_kind(open_checkpoint(write(tmp_path / "model.gguf", encoder_of(case.config), case)))


def test_positions_that_turn_are_refused_where_they_are_learned(tmp_path: Path) -> None:
    case = replace(GGUF_CASES["gpt2"], keys={**GGUF_CASES["gpt2"].keys, "rope.freq_base": 1e4})
    with pytest.raises(UnsupportedError, match=r"gpt2\.rope\.freq_base"):
        open_checkpoint(write(tmp_path / "model.gguf", theirs(case.config), case))


@pytest.mark.parametrize(("bias", "learned"), [(0.0, False), (4.0, False), (8.0, True)])
def test_positions_of_mpt_that_we_do_not_have_are_refused(bias: float, learned: bool, tmp_path: Path) -> None:
    case = replace(GGUF_CASES["mpt"], keys={**GGUF_CASES["mpt"].keys, "attention.max_alibi_bias": bias})
    model = theirs(case.config)
    if learned:
        model.transformer.wpe = torch.nn.Embedding(case.config["max_position"], case.config["width"])
    file = write(tmp_path / "model.gguf", model, case)
    with pytest.raises(UnsupportedError, match=rf"mpt\.attention\.max_alibi_bias = {bias}"):
        open_checkpoint(file)


def without(case: GgufCase, *keys: str) -> GgufCase:
    return replace(case, keys={key: value for key, value in case.keys.items() if key not in keys})


def test_the_window_of_gemma2_is_4096_where_a_file_does_not_say_it(tmp_path: Path) -> None:
    """As in llama.cpp: the first files of it do not."""
    case = without(GGUF_CASES["gemma2"], "attention.sliding_window")
    source = open_checkpoint(write(tmp_path / "model.gguf", theirs(case.config), case))
    assert source.config["layer_windows"] == [4096, 0, 4096, 0]
    none = replace(case, keys={**case.keys, "attention.sliding_window": 0})
    assert open_checkpoint(write(tmp_path / "none.gguf", theirs(case.config), none)).config["sliding_window"] is None


def test_the_cap_of_gemma4_is_30_where_a_file_does_not_say_it(tmp_path: Path) -> None:
    """So llama.cpp computes it; 0 is no cap, and is written for a model without one."""
    case, key = GGUF_CASES["gemma4_dense"], "final_logit_softcapping"
    model = theirs(case.config)
    caps = {None: 30.0, 0.0: 0.0, 3.0: 3.0}
    for value, cap in caps.items():
        written = without(case, key) if value is None else replace(case, keys={**case.keys, key: value})
        assert open_checkpoint(write(tmp_path / f"{value}.gguf", model, written)).config["logit_cap"] == cap
    uncapped = open_checkpoint(tmp_path / "0.0.gguf")
    shapes = {name: info.shape for name, info in uncapped.tensors.items()}
    assert to_gguf(uncapped.config, shapes)[0][f"gemma4.{key}"] == 0


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("gemma3", "attn_logit_softcapping", 5.0, r"gemma3\.attn_logit_softcapping = 5\.0"),
        *(
            (name, "attention.sliding_window", 9, r"attention\.sliding_window = 9.*attend to everything")
            for name in ("seed_oss", "ernie4_5", "hunyuan", "granite", "glm4", "smollm3", "gpt_neox")
        ),
        ("granite", "rope.scaling.finetuned", False, r"granite\.rope\.scaling\.finetuned = False"),
    ],
)
def test_keys_that_llama_cpp_reads_otherwise_are_refused(
    name: str, key: str, value: int | float | bool, message: str, tmp_path: Path
) -> None:
    case = GGUF_CASES[name]
    changed = replace(case, keys={**case.keys, key: value})
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(write(tmp_path / "model.gguf", theirs(case.config), changed))
    neutral = replace(case, keys={**case.keys, key: type(value)(1) if isinstance(value, bool) else type(value)(0)})
    open_checkpoint(write(tmp_path / "neutral.gguf", theirs(case.config), neutral))


def test_the_base_of_rope_is_not_guessed(tmp_path: Path) -> None:
    """llama.cpp takes 10,000, and Gemma 3 was trained with another."""
    import gguf

    case = GGUF_CASES["gemma3"]
    file = write(tmp_path / "model.gguf", theirs(case.config), case)
    reader, writer = gguf.GGUFReader(str(file)), gguf.GGUFWriter(str(tmp_path / "new.gguf"), "gemma3")
    for field in reader.fields.values():
        if field.name.startswith("gemma3.") and field.name != "gemma3.rope.freq_base":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"gemma3\.rope\.freq_base: is missing"):
        open_checkpoint(tmp_path / "new.gguf")


def test_layers_that_guess_further_tokens_are_not_read(tmp_path: Path) -> None:
    """A file of llama.cpp counts them among its blocks, and has their tensors behind those of the model."""
    case = GGUF_CASES["qwen3_5_alike"]
    model = theirs(case.config)
    keys = {**case.keys, "block_count": 5, "nextn_predict_layers": 1}
    keys["attention.recurrent_layers"] = [*case.config["recurrent"], False]
    further = [f"blk.4.{name}.weight" for name in ("attn_norm", "nextn.eh_proj", "nextn.enorm")]

    def beside(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Any:
        if name != "model.norm.weight":
            return case.values(name, values, config)
        return [(name, values + 1), *((tensor, np.zeros(64, np.float32)) for tensor in further)]

    spread = replace(case, keys=keys, values=beside)
    source = open_checkpoint(write(tmp_path / "model.gguf", model, spread))
    assert source.config["layers"] == 4
    assert sorted(source.unused) == further
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(Eager(source).step(IDS) - expected).max() < 2e-5


def test_a_file_of_before_has_q_k_v_and_z_in_one_tensor(tmp_path: Path) -> None:
    case = GGUF_CASES["qwen3_next"]

    def joined(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Any:
        return values if "in_proj_qkvz" in name else case.values(name, values, config)

    model = theirs(case.config)
    source = open_checkpoint(write(tmp_path / "model.gguf", model, replace(case, values=joined)))
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(Eager(source).step(IDS) - expected).max() < 2e-5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ssm.time_step_rank": 3}, r"qwen35\.ssm\.time_step_rank"),
        ({"ssm.group_count": 0}, r"qwen35\.ssm\.group_count"),
        ({"full_attention_interval": 0}, r"qwen35\.full_attention_interval"),
        ({"nextn_predict_layers": 4}, r"qwen35\.nextn_predict_layers"),
    ],
)
def test_sizes_of_linear_layers_that_cannot_be_are_refused(
    keys: Mapping[str, int], message: str, tmp_path: Path
) -> None:
    case = GGUF_CASES["qwen3_5"]
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(write(tmp_path / "model.gguf", theirs(case.config), replace(case, keys={**case.keys, **keys})))


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("deepseek_v3_half", "halves of a head turned"),
        ("granitemoehybrid_turned", "bounds of steps"),
        ("lfm2_biases", "biases"),
        ("qwen3_next_dense", "no experts"),
        ("exaone_moe_between", "a dense layer between those of experts"),
        ("mamba2_groups", "convolutions without a bias"),
    ],
)
def test_what_an_architecture_does_not_compute_is_refused_by_name(name: str, feature: str) -> None:
    with pytest.raises(UnsupportedError, match=f"model with {feature} is not supported: llama.cpp does not compute"):
        form_of(CASES[name].config)
