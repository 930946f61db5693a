"""GGUF files of llama.cpp's own converter are read as the folders that they are of, and ours are like them.

The converter is that of `tests/llama_cpp_converter.py`, llama.cpp the one of `tests/llama_cpp.py`.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="what llama.cpp is compared with runs in torch")
pytest.importorskip("transformers", reason="it is what llama.cpp is compared with")

from converted_models import CONVERTED, GELU, LLAMA3, QWEN, VOCAB, ConvertedRow, different, save  # noqa: E402

from roofline.bundle.text_side import text_of_folder  # noqa: E402
from roofline.models.registry import configure  # noqa: E402
from roofline.models.spec import expand  # noqa: E402
from roofline.text.tokenizers.from_gguf import from_gguf  # noqa: E402
from roofline.weights.adapter_files import write_adapter  # noqa: E402
from roofline.weights.adapters import read_adapter  # noqa: E402
from roofline.weights.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from roofline.weights.files.gguf_parts import GGUFModel  # noqa: E402
from roofline.weights.latent_form import latent_form  # noqa: E402
from roofline.weights.rope_rows import heads_of, reorder  # noqa: E402
from roofline.weights.to_hf import hf_config  # noqa: E402
from tests.adapter_files import for_checkpoint  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402
from tests.llama_cpp import LlamaCpp  # noqa: E402
from tests.llama_cpp_converter import Converter, Settings  # noqa: E402
from tests.models.parity_cases import CASES, ENCODERS, Eager, encoder_of, measure_encoder, theirs  # noqa: E402
from tests.text.test_real_tokenizers import TEXTS  # noqa: E402
from tests.weights.gguf_families import GGUF_CASES  # noqa: E402
from tools import real_tokenizers  # noqa: E402

ROPE_FACTORS = "rope_freqs.weight"
IDS = np.random.default_rng(1).integers(0, 256, 90).tolist()


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    program = LlamaCpp()
    yield program
    program.close()


@pytest.fixture(scope="module")
def converter() -> Iterator[Converter]:
    program = Converter()
    yield program
    program.close()


@dataclass(frozen=True)
class Converted:
    """A row's folder, and the file that llama.cpp's converter made of it."""

    row: ConvertedRow
    folder: Path
    file: Path


@pytest.fixture(scope="module", params=CONVERTED)
def converted(
    request: pytest.FixtureRequest, converter: Converter, tmp_path_factory: pytest.TempPathFactory
) -> Converted:
    row, path = CONVERTED[request.param], tmp_path_factory.mktemp(request.param)
    folder = save(path / "model", theirs(row.config | {"vocab": VOCAB}), row.published)
    return Converted(row, folder, converter.convert(folder, path / "theirs.gguf"))


def expected(row: ConvertedRow, changes: Mapping[str, Any]) -> np.ndarray:
    """transformers' logits of the row's weights in a changed configuration."""
    model = theirs({**row.config, "vocab": VOCAB, **changes})
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float().numpy()  # type: ignore[no-any-return]


def assert_near(logits: np.ndarray, right: np.ndarray, most: float) -> None:
    difference = np.abs(logits - right).max() / right.std()
    print(f"{difference:.1e}")
    assert difference < most


def parameters(source: Checkpoint, like: Checkpoint, rope_style: str) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters that the configuration of `like` has, the rows of q and k in the order of `rope_style`."""
    family, cfg = configure(like.config)
    for param in expand(family.spec(cfg), cfg.layers):
        if param.tied_to is None:
            values = source.parameter(param)
            heads = heads_of(param.name, like.config)
            if heads and source.config["rope_style"] != rope_style:
                raw = reorder(values.view(np.uint8).reshape(-1), len(values), heads, rope_style)
                values = raw.view(np.float32).reshape(values.shape)
            yield param.name, values


def test_its_file_is_read_as_the_folder(converted: Converted) -> None:
    """The same configuration but for what such files do not say, the same bits, transformers' logits."""
    read, row = open_checkpoint(converted.file), converted.row
    folder = latent_form(open_checkpoint(converted.folder), bool(read.config.get("latent")))
    assert different(read.config, {**folder.config, **row.unsaid}) == []
    style = read.config["rope_style"]
    for (name, ours), (_, right) in zip(
        parameters(read, folder, style), parameters(folder, folder, style), strict=True
    ):
        if name.endswith(".a_log.weight"):  # through exp and its inverse
            assert np.allclose(ours, right, rtol=0, atol=2e-7), name
        else:
            assert np.array_equal(ours, right), name
    read.check_names(name for name, _ in parameters(read, folder, style))
    assert_near(Eager(read).step(IDS), expected(row, row.unsaid), 1e-5)


def test_llama_cpp_computes_its_file_as_we_do(converted: Converted, llama_cpp: LlamaCpp) -> None:
    row = converted.row
    right = expected(row, {**row.unsaid, **row.uncomputed})
    assert_near(llama_cpp.logits(converted.file, IDS), right, row.most)


# What our files say besides, as others of the converter's do: what llama.cpp takes where it is not said.
MORE = {"vocab_size", "rope.dimension_count", "rope.freq_base", "attention.head_count_kv"}
MORE |= {"attention.key_length", "attention.value_length", "expert_weights_norm"}
# What they do not say, as it says nothing: no window, and the original context without a scaling.
LESS = {"attention.sliding_window": 0, "rope.scaling.original_context_length": 4096}


def assert_same_files(ours: Path, right: Path, unsaid: set[str]) -> None:
    """The same keys of the architecture and the same tensors with the same bytes; unsaid: keys that `right` lacks."""
    one, other = GGUFModel(ours), GGUFModel(right)
    kind = "general.architecture"
    assert one.metadata[kind] == other.metadata[kind]
    mine, keys = (_keys(model.metadata, f"{model.metadata[kind]}.") for model in (one, other))
    assert mine.keys() - keys.keys() <= MORE | unsaid
    for key, value in keys.items():
        assert mine.get(key, LESS.get(key)) == value, key
    assert one.tensors.keys() == other.tensors.keys()
    for name, info in other.tensors.items():
        mine_info = one.tensors[name]
        assert mine_info.format == info.format, name
        assert [size for size in mine_info.shape if size > 1] == [size for size in info.shape if size > 1], name
        if name == ROPE_FACTORS or name.endswith(".ssm_a"):  # which llama.cpp computes in float32
            assert np.allclose(one.read(name).view(np.float32), other.read(name).view(np.float32), rtol=1e-6)
        else:
            assert np.array_equal(one.read(name), other.read(name)), name


def _keys(metadata: Mapping[str, Any], within: str) -> dict[str, Any]:
    return {key.removeprefix(within): value for key, value in metadata.items() if key.startswith(within)}


def test_our_file_is_as_its(converted: Converted, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    row, out = converted.row, tmp_path / "ours.gguf"
    result = call_roofline(["convert", converted.folder, "-o", out])
    assert result.exit_code == 0, result.output
    assert "does not load" not in result.stdout
    assert_same_files(out, converted.file, {"attention.sliding_window"} if row.unsaid else set())
    assert_near(llama_cpp.logits(out, IDS), expected(row, {**row.unsaid, **row.uncomputed}), row.most)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_an_encoder_is_read_as_its_folder(name: str, converter: Converter, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    """Of RoBERTa's positions the converter leaves out the rows before the first, and so the padding id."""
    config = {**ENCODERS[name].config, "vocab": VOCAB}
    model = encoder_of(config)
    folder = save(tmp_path / "model", model, {})
    file = converter.convert(folder, tmp_path / "theirs.gguf")
    read, before = open_checkpoint(file), open_checkpoint(folder)
    assert different(read.config, {**before.config, "first_position": 0}) == []
    for (part, ours), (_, right) in zip(
        parameters(read, read, "half"), parameters(before, before, "half"), strict=True
    ):
        assert np.array_equal(ours, right[len(right) - len(ours) :]), part
    assert measure_encoder(config, read)[0] < 1e-5
    ids = [at for at in IDS if at > 2]
    with torch.no_grad():
        rows = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    assert_near(llama_cpp.hidden(file, ids), rows, GELU)


def test_heads_of_bamba_that_turn_by_half_are_written_as_llama_cpp_turns_them(
    converter: Converter, llama_cpp: LlamaCpp, tmp_path: Path
) -> None:
    """The converter brings together rows of the two halves of a head, of which llama.cpp turns the first pairs;
    transformers turns the first half of the head alone. Of such a file we compute what llama.cpp does."""
    row = ConvertedRow(CASES["bamba"].config)
    folder, out = save(tmp_path / "model", theirs(row.config | {"vocab": VOCAB}), {}), tmp_path / "ours.gguf"
    right = expected(row, {})
    result = call_roofline(["convert", folder, "-o", out])
    assert result.exit_code == 0, result.output
    assert_near(llama_cpp.logits(out, IDS), right, row.most)
    assert_near(Eager(open_checkpoint(out)).step(IDS), right, row.most)
    fields = json.loads((folder / "config.json").read_text()) | {"attn_rotary_emb": row.config["rotary_dim"]}
    (folder / "config.json").write_text(json.dumps(fields))  # as published: without it the file says whole heads
    file = converter.convert(folder, tmp_path / "theirs.gguf")
    other = llama_cpp.logits(file, IDS)
    assert np.abs(other - right).max() / right.std() > 0.1
    assert_near(Eager(open_checkpoint(file)).step(IDS), other, 2 * row.most)  # both are rounded


UNLOADED = {
    "rope_freqs": QWEN | {"qk_norm": True, "rope_scaling": LLAMA3},
    "olmo2": {**CONVERTED["olmo2"].config, "tied": True},
    "gptneox": {**CONVERTED["gpt_neox"].config, "tied": True},
    "gpt-oss": {**CONVERTED["gpt_oss"].config, "tied": True},
    "qwen2moe": {**CONVERTED["qwen2_moe"].config, "tied": True},
}


@pytest.mark.parametrize("name", UNLOADED)
def test_that_llama_cpp_does_not_load_a_file_is_said(name: str, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    folder, out = save(tmp_path / "model", theirs({**UNLOADED[name], "vocab": VOCAB}), {}), tmp_path / "new.gguf"
    result = call_roofline(["convert", folder, "-o", out])
    assert result.exit_code == 0, result.output
    assert re.search(f"does not load .*{name}", result.stdout)
    with pytest.raises(AssertionError, match="does not load the file"):
        llama_cpp.logits(out, IDS)


ADAPTED = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "granite", "glm4", "olmo2")
# Gated DeltaNet, whose value heads are moved; it needs what published files say of layers that guess tokens.
HYBRIDS = {"qwen3_5": (GGUF_CASES["qwen3_5"].config, {"mtp_num_hidden_layers": 1})}


@pytest.mark.parametrize("name", [*ADAPTED, *HYBRIDS])
def test_the_file_of_an_adapter_is_as_its(name: str, converter: Converter, tmp_path: Path) -> None:
    """The same matrices with the same bytes in both, the rows of q and k permuted where those of the model are."""
    config, published = HYBRIDS[name] if name in HYBRIDS else (CONVERTED[name].config, {})
    folder = save(tmp_path / "model", theirs({**config, "vocab": VOCAB}), published)
    model = open_checkpoint(folder)
    write_adapter(tmp_path / "adapter", model.config, for_checkpoint(model.tensors))
    right = converter.convert(tmp_path / "adapter", tmp_path / "theirs.gguf", Settings(base=str(folder)))
    result = call_roofline(["convert", tmp_path / "adapter", "-o", tmp_path / "ours.gguf", "--base", folder])
    assert result.exit_code == 0, result.output
    ours, its = read_adapter(tmp_path / "ours.gguf").matrices, read_adapter(right).matrices
    described = [sorted((m.tensor, m.scale, m.rank, m.paired, m.tiled) for m in matrices) for matrices in (ours, its)]
    assert described[0] == described[1]
    one, other = GGUFModel(tmp_path / "ours.gguf"), GGUFModel(right)
    assert one.tensors.keys() == other.tensors.keys()
    assert all(np.array_equal(one.read(tensor), other.read(tensor)) for tensor in other.tensors)


@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("name", ["llama_llama3", "gemma3", "gpt2", "mpt", "phi3_long", "qwen2_moe", "mixtral"])
def test_llama_cpp_computes_what_quantize_writes(name: str, mix: str, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    """As we compute the same file, but for its products of weights with activations of 8 bits, by which the tokens of
    some few choose other experts."""
    row = CONVERTED[name]
    folder, out = save(tmp_path / "model", theirs({**row.config, "vocab": VOCAB}), row.published), tmp_path / "new.gguf"
    result = call_roofline(["quantize", folder, "--to", mix, "-o", out])
    assert result.exit_code == 0, result.output
    right = Eager(open_checkpoint(out)).step(IDS)
    differences = np.abs(llama_cpp.logits(out, IDS) - right).max(-1) / right.std()
    print(f"{np.median(differences):.1e}")
    assert np.median(differences) < 0.15


# Of Gemma's norms in float16 the converter rounds the sums with 1 to float16, and we do not.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bf16") for name in ("llama", "gemma2", "gpt_oss", "gpt2", "phi3_long", "qwen2_moe", "mpt")),
        *((name, "f16") for name in ("llama", "gpt_oss", "gpt_neox", "mixtral")),
    ],
)
def test_a_file_of_16_bits_is_as_its(name: str, dtype: str, converter: Converter, tmp_path: Path) -> None:
    """The same tensors stay in float32 in both."""
    row = CONVERTED[name]
    model = theirs(row.config | {"vocab": VOCAB}).to({"bf16": torch.bfloat16, "f16": torch.float16}[dtype])
    folder = save(tmp_path / "model", model, row.published)
    right = converter.convert(folder, tmp_path / "theirs.gguf", Settings(dtype))
    result = call_roofline(["convert", folder, "-o", tmp_path / "ours.gguf"])
    assert result.exit_code == 0, result.output
    assert_same_files(tmp_path / "ours.gguf", right, set())
    read, before = open_checkpoint(right), open_checkpoint(folder)
    for (name, ours), (_, values) in zip(
        parameters(read, before, read.config["rope_style"]),
        parameters(before, before, read.config["rope_style"]),
        strict=True,
    ):
        assert np.array_equal(ours, values), name


def test_a_split_file_is_read_as_one(converter: Converter, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", theirs(CONVERTED["llama"].config | {"vocab": VOCAB}), {})
    converter.convert(folder, tmp_path / "part.gguf", Settings(split=5))
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    read, before = open_checkpoint(parts[0]), open_checkpoint(folder)
    for (name, ours), (_, values) in zip(
        parameters(read, before, "interleaved"), parameters(before, before, "interleaved"), strict=True
    ):
        assert np.array_equal(ours, values), name


# Folders of `tools/real_tokenizers.py`, and a row whose class the converter takes them for; rows of the vocabulary.
VOCABULARIES = {"llama3_1": ("llama", 128256), "qwen3": ("qwen3", 151936), "gemma3": ("gemma3", 262208)}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_its_vocabulary_gives_the_ids_of_the_folder(name: str, converter: Converter, tmp_path: Path) -> None:
    """gemma3's, which has no tokenizer.model here, is converted as a BPE with visible spaces."""
    published = real_tokenizers.FOLDER / name
    if not published.is_dir():
        pytest.skip(f"{published} is not here: python -m tools.real_tokenizers")
    folder, (row, rows) = shutil.copytree(published, tmp_path / "model"), VOCABULARIES[name]
    (folder / "config.json").write_text(json.dumps(hf_config({**CONVERTED[row].config, "vocab": rows})))
    file = converter.convert(folder, tmp_path / "vocabulary.gguf", Settings(vocab_only=True))
    read, right = from_gguf(GGUFModel(file).metadata, file), text_of_folder(folder)[0]
    for text in TEXTS:
        ids = right.encode(text, add_special=True, parse_special=True)
        assert read.encode(text, add_special=True, parse_special=True) == ids, text
