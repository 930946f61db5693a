"""Small sound files of models of each kind, which `crafted_files.py` changes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from roofline.ops import formats
from roofline.weights import random_weights
from roofline.weights.files import gguf_writer, safetensors_writer
from roofline.weights.files.mapped import TensorInfo
from tests.bundle.bundle_models import MPT, tokenizer_json, write_mpt
from tests.models.parity_cases import CASES
from tests.weights import quantised_models, test_float8, test_quantised

SHORT = {"layers": 1, "vocab": 320}


def small(name: str) -> dict[str, Any]:
    """The configuration of a case of parity with as few layers as it has meaning with."""
    config = dict(CASES[name].config) | SHORT
    config["layers"] = 1 + len(config.get("dense", ()))
    if config.get(
        "layer_width"
    ):  # rows of an embedding for each layer, which one layer alone would want of some tokens
        config["layers"] = 2
    if config.get("turning"):
        config["turning"] = [config["turning"][0]] * config["layers"]
    if config.get("recurrent"):
        config |= {"layers": 2, "recurrent": [True, False]}
        config |= {"dense": [layer for layer in config["dense"] if layer < 2]} if config.get("dense") else {}
    if config.get("sparse"):  # Nemotron-H's kinds of layers: one more, with experts
        config |= {"layers": 3, "recurrent": [True, False, False], "dense": [], "sparse": [2]}
    elif config["family"] == "nemotron_h":
        config |= {"layers": 3, "recurrent": [True, False, False], "dense": [2]}
    for key in ("sparsity", "layer_ffns"):
        if config.get(key):
            config[key] = (config[key] * config["layers"])[: config["layers"]]
    if config.get("sharing_layers"):
        config["sharing_layers"] = 0
    return config | ({"sliding_window": 9, "layer_windows": ()} if config.get("layer_windows") else {})


def _as_gguf(path: Path, config: dict[str, Any], form: str, tokenizer: dict[str, object]) -> Path:
    """Random weights in a format, by the writer of GGUF files."""
    from roofline.weights.config.to_gguf import form_of, to_gguf
    from roofline.weights.gguf_form import gguf_form
    from roofline.weights.gguf_tensors import gguf_tensors
    from roofline.weights.latent_form import latent_config

    config = latent_config(config | {"rope_style": form_of(config).rope_style}, latent=True)
    made = gguf_form(random_weights.random_checkpoint(config, 0, form))
    metadata, factors = to_gguf(config, {name: info.shape for name, info in made.tensors.items()})
    assert not factors
    tensors = gguf_tensors(config, list(made.tensors.values()))
    infos = [tensor.info for tensor in tensors]
    parts = {tensor.info.name: tensor.parts for tensor in tensors}
    with path.open("wb") as stream:
        stream.write(gguf_writer.header({**metadata, **tokenizer}, infos))
        gguf_writer.write_tensors(stream, infos, lambda info: (made.read(part) for part in parts[info.name]))
    return path


def byte_tokenizer(rows: int) -> dict[str, object]:
    """The keys of a tokenizer of bytes, for a vocabulary of so many rows."""
    from roofline.text.tokenizers.from_json import from_json
    from roofline.text.tokenizers.to_gguf import to_gguf

    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    return to_gguf(from_json(json.dumps(tokenizer_json()).encode(), settings), rows, "{{ messages[0]['content'] }}")


WRITTEN = (
    "llama",
    "qwen3",
    "gemma3",
    "phi3",
    "granite",
    "gpt_neox",
    "gpt2",
    "smollm3",
    "olmo2",
    "glm4",
    "seed_oss",
    "ernie4_5",
    "olmo3",
    "exaone4",
    "hunyuan",
)
# The same, in float32: they have rows that are no whole blocks.
IN_FLOAT32 = (
    *("qwen3_5", "gemma3n", "deepseek_v3", "mistral4", "glm4_moe", "lfm2_moe"),
    *("granitemoehybrid", "nemotron_h", "jamba"),
)


def ggufs(folder: Path) -> Iterator[Path]:
    """Of each architecture that we write, in several formats."""
    forms = ("Q4_0", "Q8_0", "F16", "F32", "BF16", "Q5_1", "MXFP4")
    for number, name in enumerate(WRITTEN):
        config = small(name)
        if name == "gemma3":
            config |= {"query_scalar": float(config["head_dim"])}
        yield _as_gguf(folder / f"{name}.gguf", config, forms[number % len(forms)], byte_tokenizer(320))
    for name in IN_FLOAT32:
        yield _as_gguf(folder / f"{name}.gguf", small(name), "F32", byte_tokenizer(320))
    for name, fields in (
        ("mixtral", {"experts": 4, "experts_per_token": 2}),
        ("qwen_moe", {"experts": 4, "experts_per_token": 2, "qk_norm": True, "renormalise": True}),
    ):
        base = small("llama") | {"family": name, "tied": False} | fields
        yield _as_gguf(folder / f"{name}.gguf", base, "Q4_0", byte_tokenizer(320))


def gguf_parts(folder: Path) -> Iterator[Path]:
    """A model in three files."""
    from tests.weights.test_gguf_parts import builders, save

    (folder / "parts").mkdir()
    save(folder / "parts", builders())
    yield folder / "parts"


def gguf_tokenizers(folder: Path) -> Iterator[Path]:
    """A small model with a tokenizer of each kind."""
    config = small("llama") | {"width": 32, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 600}
    for number, keys in enumerate(tokenizer_keys()):
        tokens = keys["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        rows = {"vocab": len(tokens)}
        yield _as_gguf(folder / f"{number}.gguf", config | rows, "Q4_0", keys)


def tokenizer_keys() -> Iterator[dict[str, object]]:
    """Byte-level BPE, SentencePiece's two, WordPiece."""
    letters = [chr(97 + i) for i in range(26)]
    bytes_, joined = byte_tokenizer(320), ("th", "the", "he")
    for key, values in (("tokens", joined), ("token_type", (1, 1, 1))):
        bytes_[f"tokenizer.ggml.{key}"][260:263] = values  # type: ignore[index]
    yield bytes_ | {"tokenizer.ggml.merges": ["t h", "th e", "h e"]}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *letters, "th", "the", "▁the"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    common: dict[str, object] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    yield {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", **common}
    yield {"tokenizer.ggml.model": "t5", **common, "tokenizer.ggml.remove_extra_whitespaces": True}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), "▁the"]
    yield {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3] * 5 + [1] * (len(words) - 5),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
    }


def _folder(folder: Path, config: dict[str, Any], form: str) -> Path:
    """Random weights as Hugging Face's files have them."""
    from roofline.weights.to_hf import write_folder

    made = random_weights.random_checkpoint(config, 0, form)
    write_folder(
        folder, config, [(name, info.shape, made.read(name)) for name, info in made.tensors.items()], form,
        {"tokenizer.json": json.dumps(tokenizer_json()).encode()},
    )  # fmt: skip
    return folder


def safetensors(folder: Path) -> Iterator[Path]:
    """Of each family; one in several files with their index."""
    for name in ("llama", "gemma2", "phi3", "gpt_oss", "gpt_neox", "gpt2", "opt", "granite", "deepseek_v2_lite"):
        yield _folder(folder / name, small(name), "BF16" if len(name) % 2 else "F32")
    yield write_mpt(folder / "mpt", "alibi")
    tensors = {f"model.layers.0.{part}.weight": shape for part, shape in quantised_models.SHAPES.items()}
    wide, vocab = quantised_models.WIDTH, quantised_models.VOCAB
    tensors |= {f"model.layers.0.{n}.weight": (wide,) for n in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {"model.norm.weight": (wide,), "model.embed_tokens.weight": (vocab, wide)}
    infos = [TensorInfo(n, "F32", shape, formats.get("F32").nbytes(shape)) for n, shape in tensors.items()]
    (folder / "several").mkdir()
    bytes_of_file, safetensors_writer.FILE_BYTES = safetensors_writer.FILE_BYTES, 100_000
    safetensors_writer.write_tensors(folder / "several", infos, lambda info: [np.ones(info.nbytes, np.uint8)])
    safetensors_writer.FILE_BYTES = bytes_of_file
    (folder / "several" / "config.json").write_text(json.dumps(quantised_models.CONFIG))
    yield folder / "several"


def quantised(folder: Path) -> Iterator[Path]:
    """Of each method of Hugging Face's checkpoints."""
    for number, kind in enumerate(quantised_models.KINDS):
        yield quantised_models.written(folder / str(number), kind)
    for kind in test_float8.KINDS:
        (folder / kind).mkdir()
        yield test_float8.written(folder / kind, kind)
    yield quantised_models.write(folder / "nf4", _nf4(nested=False), test_quantised.NF4)
    yield quantised_models.write(folder / "nf4-nested", _nf4(nested=True), test_quantised.NF4)


def _nf4(nested: bool) -> dict[str, Any]:
    """Codes, scales and states as bitsandbytes lays them out; the values are of no model."""
    import torch

    from roofline.ops.formats import nf4

    rng = np.random.default_rng(0)
    stored = quantised_models.plain_tensors(rng)
    for part, shape in quantised_models.SHAPES.items():
        name, blocks = f"model.layers.0.{part}.weight", shape[0] * shape[1] // 64
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        stored[name] = torch.from_numpy(rng.integers(0, 256, (shape[0] * shape[1] // 2, 1), np.uint8))
        stored[f"{name}.quant_map"] = torch.from_numpy(nf4.VALUES.astype(np.float32).copy())
        stored[f"{name}.absmax"] = torch.rand(blocks)
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
            stored[f"{name}.absmax"] = torch.from_numpy(rng.integers(0, 256, blocks, np.uint8))
            stored[f"{name}.nested_absmax"] = torch.rand(-(-blocks // 256))
            stored[f"{name}.nested_quant_map"] = torch.linspace(-1, 1, 256)
        text = json.dumps(state).encode()
        stored[f"{name}.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return stored


def torch_pickles(folder: Path) -> Iterator[Path]:
    """As torch saves now and as it did before version 1.6."""
    from tests.weights import test_torch_pickle

    for zipped in (True, False):
        place = folder / f"zipped-{zipped}"
        place.mkdir()
        tensors = test_torch_pickle.plain()
        yield test_torch_pickle.folder(place, tensors, _use_new_zipfile_serialization=zipped)


def configs(folder: Path) -> Iterator[Path]:
    """A config.json of each case of parity, and of MPT's forms."""
    from roofline.weights.to_hf import hf_config

    fields = {name: hf_config(small(name)) for name in CASES}
    for name, values in (fields | {f"mpt-{form}": values for form, values in MPT.items()}).items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
        yield folder / name


def tokenizers(folder: Path) -> Iterator[Path]:
    """tokenizer.json of each model, with tokenizer_config.json and generation_config.json."""
    from tests.text import test_written_tokenizers as written

    for number, data in enumerate((tokenizer_json(), written._byte_level(), written._sentencepiece(), *_by_library())):
        place = folder / str(number)
        place.mkdir()
        (place / "tokenizer.json").write_text(json.dumps(data))
        template = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
        (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
        (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "temperature": 0.5}))
        yield place


def _by_library() -> Iterator[Any]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = [chr(97 + i) for i in range(26)]
    pieces = Tokenizer(models.WordPiece({w: i for i, w in enumerate(["[UNK]", *letters, "##s", "the"])}))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    pieces.decoder, pieces.post_processor = (
        decoders.WordPiece(),
        processors.TemplateProcessing("$A [UNK]", None, [("[UNK]", 0)]),
    )
    yield json.loads(pieces.to_str())
    vocab = [("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in letters), ("▁the", -1.0)]
    unigram = Tokenizer(models.Unigram(vocab, 0, byte_fallback=False))
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    yield json.loads(unigram.to_str())
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    yield json.loads(words.to_str())


def older_tokenizers(folder: Path) -> Iterator[Path]:
    """Folders without tokenizer.json: vocab.json with merges.txt, vocab.txt, tokenizer.model."""
    from tests.text import test_word_pieces as pieces

    yield pieces.write_bert(folder / "bert", [*pieces.SPECIALS, *"abcdefghijklmnopqrstuvwxyz", "##s", "the"])
    place = folder / "gpt2"
    place.mkdir()
    (place / "vocab.json").write_text(
        json.dumps(tokenizer_json()["model"]["vocab"] | {"<|endoftext|>": 256, "he": 257})
    )
    (place / "merges.txt").write_text("#version: 0.2\nh e\n")
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    yield place
    try:
        from tests.text import test_sentencepiece_models as sentencepiece
    except BaseException as error:
        print(f"no tokenizer.model: {error}")
        return
    for number, name in enumerate(sentencepiece.MODELS):
        place = folder / f"model{number}"
        place.mkdir()
        sentencepiece.trained(place, **sentencepiece.MODELS[name])
        for spare in ("text", "tokenizer.vocab"):
            (place / spare).unlink(missing_ok=True)
        kind = "T5Tokenizer" if name in ("T5", "lower case", "Unigram with bytes") else "LlamaTokenizer"
        (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
        yield place
