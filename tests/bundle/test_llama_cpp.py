"""llama.cpp loads the GGUF files that we write, and computes what the model of transformers does that they are of.

llama.cpp is the one of `tests/llama_cpp.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="what llama.cpp is compared with runs in torch")
pytest.importorskip("transformers", reason="it is what llama.cpp is compared with")

from bundle_models import tokenizer_json  # noqa: E402
from converted_models import GEMMA3N_AS_PUBLISHED  # noqa: E402
from moe_models import MODELS as MIXTURES  # noqa: E402
from moe_models import transformers_model  # noqa: E402

from roofline.bundle import load, load_text_of  # noqa: E402
from roofline.ops.batch import Segment  # noqa: E402
from roofline.weights.adapter_files import write_adapter  # noqa: E402
from roofline.weights.adapter_merge import merged  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from roofline.weights.config.to_gguf import read_otherwise  # noqa: E402
from tests.adapter_files import for_checkpoint  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402
from tests.llama_cpp import LlamaCpp  # noqa: E402
from tests.models.parity_cases import BASE, CASES, theirs  # noqa: E402
from tests.weights.gguf_families import GGUF_CASES  # noqa: E402

IDS = np.random.default_rng(1).integers(0, 256, 40).tolist()
CONFIGS: dict[str, Any] = {name: CASES[name].config for name in ("llama", "mistral", "qwen2", "qwen3")}
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 8.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
CONFIGS |= {kind: BASE | {"rope_scaling": {"rope_type": kind, **values}} for kind, values in SCALINGS.items()}
# Of phi3_long transformers takes the other factors in a text as short as IDS.
CONFIGS |= {name: case.config for name, case in GGUF_CASES.items() if name != "phi3_long"}
CONFIGS["gemma3n"] = GEMMA3N_AS_PUBLISHED
# Heads of gated DeltaNet as published: it takes parts of rope that narrower ones do not have.
WIDE = {"width": 128, "heads": 2, "kv_heads": 1, "head_dim": 256, "rotary_dim": 64, "key_dim": 128, "value_dim": 128}
CONFIGS |= {name: config | WIDE for name, config in CONFIGS.items() if "key_heads" in config}


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    program = LlamaCpp()
    yield program
    program.close()


def written(folder: Path, model: Any, form: str = "") -> Path:
    """A GGUF file of a model of transformers, as the command line makes it; form: of its matrices, where rounded."""
    model.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "model" / "generation_config.json").unlink(missing_ok=True)  # with ids of a larger vocabulary
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    out = folder / "model.gguf"
    call = ["quantize", folder / "model", "--to", form] if form else ["convert", folder / "model"]
    result = call_roofline([*call, "-o", out])
    assert result.exit_code == 0, result.output
    return out


def assert_same(llama_cpp: LlamaCpp, file: Path, model: Any, most: float) -> None:
    """most: the difference of a logit, as a part of their standard deviation."""
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].float().numpy()
    difference = np.abs(llama_cpp.logits(file, IDS) - expected).max() / expected.std()
    print(f"{file.parent.name}: {difference:.2e}")
    assert difference < most


EXAONE = CASES["exaone4_windows"].config
# As many layers as it has windows in; the scaling of Llama 3.1 is a tensor of the file.
CONFIGS["exaone4_windows_64"] = EXAONE | {"layers": 64, "layer_windows": EXAONE["layer_windows"] * 16}
CONFIGS["exaone4_windows_64"] |= {"turning": EXAONE["turning"] * 16, "head_dim": 16}
# llama.cpp does not compute their windows, which `convert` says -> what it computes instead.
WINDOWLESS: dict[str, dict[str, Any]] = {name: {"sliding_window": None} for name in ("mistral", "phi3")}
WINDOWLESS["exaone4_windows"] = {"layer_windows": (), "turning": [True] * 4}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_has_the_logits_of_transformers(name: str, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    config = CONFIGS[name] | {"vocab": 320}
    config |= {"layer_vocab": 320} if "layer_vocab" in config else {}
    file = written(tmp_path, theirs(config))
    most = 1e-2 if name == "gemma3n" else 5e-3  # gates are cut off by the deviation of a sample there
    assert_same(llama_cpp, file, theirs(config | WINDOWLESS.get(name, {})), most)
    notes = " ".join(read_otherwise(open_checkpoint(file).config))
    assert ("without the window" in notes) == (name in WINDOWLESS)


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_has_the_logits_of_transformers(
    kind: str, llama_cpp: LlamaCpp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, transformers_model(kind))
    if kind == "gpt_oss":  # llama.cpp rounds the ends of its ramp, which `convert` says
        name, architecture, fields = MIXTURES[kind]
        rope = fields["rope_parameters"] | {"truncate": True}
        monkeypatch.setitem(MIXTURES, kind, (name, architecture, fields | {"rope_parameters": rope}))
    assert_same(llama_cpp, file, transformers_model(kind), 5e-3)


# A window that llama.cpp does not compute says nothing about adapters.
ADAPTED_NAMES = ("llama", "qwen2", "gemma2", "phi3", "smollm3", "granite", "glm4", "ministral3", "arcee", "gpt2")
ADAPTED_NAMES = (*ADAPTED_NAMES, "qwen3_5", "qwen3_next")
ADAPTED = {name: CONFIGS[name] for name in ADAPTED_NAMES}


@pytest.mark.parametrize("name", [*ADAPTED, "mixtral", "qwen3_moe"])
def test_llama_cpp_computes_the_adapters_that_are_written(name: str, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    """As the reference computes the model with the adapter in its weights; experts have an adapter each."""
    config = ADAPTED.get(name, {}) | {"vocab": 320, "sliding_window": None}
    file = written(tmp_path, theirs(config) if name in ADAPTED else transformers_model(name))
    model = open_checkpoint(tmp_path / "model")
    adapter = for_checkpoint(model.tensors)
    write_adapter(tmp_path / "adapter", model.config, adapter)
    call = ["convert", tmp_path / "adapter", "-o", tmp_path / "adapter.gguf", "--base", tmp_path / "model"]
    result = call_roofline(call)
    assert result.exit_code == 0, result.output
    options = {"backend": "reference", "arithmetic": "plain", "cache_tokens": 64, "max_model_len": 64, "text": False}
    executable = load(merged(model, adapter).checkpoint, **options).executable
    executable.batch.fill([Segment(IDS, 0, range(3))], range(len(IDS)))
    executable.forward()
    expected, alone = np.array(executable.logits()), llama_cpp.logits(file, IDS)
    got = llama_cpp.logits(file, IDS, tmp_path / "adapter.gguf")
    # Of experts and gated DeltaNet together 5.1e-3.
    assert np.abs(got - expected).max() / expected.std() < (8e-3 if name == "qwen3_next" else 5e-3)
    assert np.abs(got - alone).max() / expected.std() > 0.5


@pytest.mark.parametrize("prefixed", [True, False, "Metaspace"])
def test_a_sentencepiece_folder_has_the_same_ids(prefixed: bool | str, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    """With <unk> among its added tokens, runs of spaces that are tokens, and one token more than the model has rows.

    Metaspace, as transformers 5 writes it, puts no space before a text that begins with one: convert says so.
    """
    model = theirs(CONFIGS["llama"] | {"vocab": 320})
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    data = visible_spaces_json(320, bool(prefixed))
    if prefixed == "Metaspace":
        step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
        data |= {"normalizer": None, "pre_tokenizer": step}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(data))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    file = tmp_path / "model.gguf"
    result = call_roofline(["convert", tmp_path / "model", "-o", file])
    assert result.exit_code == 0, result.output
    assert ("puts none before a text that begins with one" in result.output) == (prefixed == "Metaspace")
    tokenizer = load_text_of(str(tmp_path / "model"))[0]
    texts = ["hi  there", "a" + " " * 40 + "hi\n\n  x", "", "é<0x0A>", "if x:\n        hi", "<unk>x<s></s>hi"]
    texts += ["<unk> x<s> </s> hi", " hi"] if prefixed != "Metaspace" else []
    for parse in (False, True):
        ours = [tokenizer.encode(text, add_special=True, parse_special=parse) for text in texts]
        assert llama_cpp.token_ids(file, texts, tmp_path / "ids.json", parse_special=parse) == ours


def visible_spaces_json(rows: int, prefixed: bool) -> dict[str, Any]:
    """The tokenizer.json of SentencePiece's kind of BPE."""
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("h", "i"), ("▁", "hi"), ("▁", "x")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abhixtre"]
    tokens += [left + right for left, right in merges]
    tokens += [f"<{at}>" for at in range(len(tokens), rows)]
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    names = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": rows}
    added = [{"id": at, "content": text, "special": True, **flags} for text, at in names.items()]
    added += [{"id": tokens.index(t), "content": t, "special": False, **flags} for t in ("▁▁", "▁▁▁▁")]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] if prefixed else []
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    decoders += [{"type": "Fuse"}, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else [])]
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, space]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **{"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
            **{"vocab": {token: at for at, token in enumerate(tokens)}, "merges": merges},
        },
    }


def test_layers_that_share_other_keys_than_llama_cpp_has_are_told(llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    config = CONFIGS["gemma4"] | {"vocab": 320, "layer_vocab": 320, "layers": 6, "sharing_layers": 2}
    file = written(tmp_path, theirs(config | {"layer_windows": [9, 9, 0, 9, 9, 0]}))
    assert any("llama.cpp ends itself" in note for note in read_otherwise(open_checkpoint(file).config))
    with pytest.raises(AssertionError):
        llama_cpp.logits(file, IDS)
