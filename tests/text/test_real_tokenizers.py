"""Tokenizers of published models, where `python -m tools.real_tokenizers` has put their files.

Of folders transformers is the judge; of GGUF files llama.cpp, by the ids that come with its vocabularies.
"""

import unicodedata
from pathlib import Path
from typing import Any

import pytest

from roofline.bundle.text_side import text_of_folder
from roofline.text.streaming.stops import Detokenizer
from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.text.tokenizers.to_gguf import to_gguf
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.weights.files.gguf import GGUFFile
from tools import llama_cpp_source
from tools.real_tokenizers import FOLDER, NPM

pytestmark = pytest.mark.slow
GGUF = llama_cpp_source.FOLDER / "models"
SPACES = ["", " ", "  ", "   ", "    ", "\n", "\n\n\n", "\t", "\t\t", " \n", "\n ", "a\n\nb", "a\r\nb", "x" + " " * 31]
SPACES += [" hello", "  hello", "hello  ", " " * 17 + "x", "\n" * 9 + "x", "\t" * 5 + "x", "if x:\n        y\n    z\n"]
SCRIPTS = [
    "Straße, naïve café — “quotes” … Ελληνικά, русский",
    "日本語の文章、한국어, العربية, हिन्दी",
    "ไทยภาษา",
    "xin chào các bạn",
]
SCRIPTS += [
    "e\u0301 \u00e9 A\u030a ﬁ ① \u212b",
    "e\u0301\u0323",
    "\u1100\u1161\u11a8",
    "𐍈𝔘𝔫𝔦 ꙮ",
    "Ａｂｃ１２３",
    "שלום עולם",
    "你好，世界！",
]
SIGNS = [
    "👍🏽 👩‍❤️‍💋‍👨 🏳️‍🌈",
    "\0\a\x1b[31m\x7f\u200b\ufeff",
    "\u2028\u2029\u0085\u00a0\u3000x",
    "№ § † • ° ± €5 £3",
    "=" * 40 + "-" * 33,
]
SIGNS += [
    "▁",
    "a▁b",
    "<0x0A> <0x41>",
    "Ġ Ċ",
    "C:\\path\\to",
    "https://example.com/a?b=c&d=%20#e",
    '{"a": [1, 2.5e-3, null]}',
]
WORDS = ["Hello world, it's 12345 o'clock; we'll see 3.14159!", "AbCdEF ABCdef 1st x2y ''s 'S I'LL DON'T _under_score_"]
WORDS += ["0 00 000 1234567890 12,345.67 ١٢٣ ²³", "def f(x):\n    return x**2  # comment\n*   **bold**\n", "a" * 70]
SPECIAL = ["<s>hello</s>", "<s> hello </s> x", "a<bos>b<eos>", "<unk> x <unk>", "<pad>x", "<mask>", "<h1>a</h1>"]
SPECIAL += [
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|begin_of_text|>hi<|eot_id|> there",
    "a <|endoftext|>  b",
    "\n<|im_end|>\n ",
]
SPECIAL += [
    "<start_of_turn>user\nhi<end_of_turn>\n",
    "<|user|>\nhi<|end|>\n",
    "<|start|>user<|message|>x<|return|>",
    "[INST] hi [/INST]",
]
SPECIAL += ["<｜begin▁of▁sentence｜>a<｜User｜>b", "<image_soft_token> x", "<unused0>  <unused1>"]
TEXTS = [*SPACES, *SCRIPTS, *SIGNS, *WORDS, *SPECIAL]


@pytest.fixture(scope="module", params=NPM)
def folder(request: pytest.FixtureRequest) -> Path:
    path = FOLDER / str(request.param)
    if not path.is_dir():
        pytest.skip(f"{path} is not here: python -m tools.real_tokenizers")
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return text_of_folder(folder)[0]


def test_ids_and_texts_are_those_of_transformers(folder: Path, ours: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference of tokenizers")
    # Llama's class drops one of the spaces that a text begins with, whatever tokenizer.json and sentencepiece say.
    kind = transformers.PreTrainedTokenizerFast if folder.name == "llama2" else transformers.AutoTokenizer
    theirs = kind.from_pretrained(str(folder))
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text, add_special=True, parse_special=True) == ids, text
        for skip in (False, True):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip), text
        stream = Detokenizer(ours)
        assert "".join([*(stream.push([i]) for i in ids), stream.flush()]) == ours.decode(ids), text
    for token in range(0, ours.vocab_size, 97):  # an id at a time, behind a word
        pair = [*ours.encode("a", add_special=False), token]
        assert ours.decode(pair, skip_special=False) == theirs.decode(pair), token


def test_ends_and_special_tokens_are_those_of_transformers(folder: Path, ours: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference of tokenizers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert (ours.bos_id, ours.eos_ids[0]) == (theirs.bos_token_id, theirs.eos_token_id)
    added = theirs.added_tokens_decoder
    assert ours.special_ids == {token for token in added if added[token].special}
    assert {token.id: token.content for token in ours.vocabulary.added} == {i: str(added[i]) for i in added}
    assert ours.encode("", add_special=True) == theirs("").input_ids


def test_a_gguf_file_of_it_is_read_as_the_folder(folder: Path, ours: Tokenizer) -> None:
    rows = 262144 if folder.name == "gemma3" else ours.vocab_size + 64  # one row less than tokens, and more
    written = to_gguf(ours, rows, None)
    assert {len(v) for k, v in written.items() if k.endswith((".tokens", ".token_type", ".scores"))} == {rows}
    read = from_gguf(written)
    for text in TEXTS:
        if "<image_soft_token>" in text or (not ours.vocabulary.byte_level and "▁▁" in text):
            continue  # a token without a row; a run of spaces that is spelt with visible ones
        for parse in (False, True):
            ids = ours.encode(text, add_special=True, parse_special=parse)
            assert read.encode(text, add_special=True, parse_special=parse) == ids, text
            assert read.decode(ids) == ours.decode(ids), text


VOCABULARIES = ("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe")
VOCABULARIES += ("llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_of_a_vocabulary_are_those_of_llama_cpp(name: str) -> None:
    path = GGUF / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not here: python -m tools.real_tokenizers")
    tokenizer = from_gguf(GGUFFile(path).metadata, path)
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    compared = 0
    for text, ids in zip(texts, Path(f"{path}.out").read_text().split("\n"), strict=False):
        if name.startswith("qwen") and not unicodedata.is_normalized("NFC", text):
            continue  # which the models' own tokenizer normalises, and llama.cpp does not
        assert tokenizer.encode(text, add_special=False) == [int(token) for token in ids.split()], text
        compared += 1
    assert compared > 40


def test_white_space_behind_phi_3s_tokens() -> None:
    path = GGUF / "ggml-vocab-phi-3.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not here: python -m tools.real_tokenizers")
    metadata: dict[str, Any] = dict(GGUFFile(path).metadata)
    chat = "<|user|>\nHello there<|end|>\n<|assistant|>\n"
    ids = [1, 32010, 15043, 727, 32007, 32001]  # llama-cpp-python 0.3.36
    tokenizer = from_gguf(metadata, path)
    assert tokenizer.encode(chat, add_special=True, parse_special=True) == ids
    assert [1, *tokenizer.encode_marked(chat, b"\1" * len(chat))] == ids
    assert from_gguf({**metadata, "general.name": "mine"}).encode(chat, add_special=True, parse_special=True) != ids
