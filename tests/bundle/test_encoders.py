"""Encoders from a folder as sentence-transformers writes it to vectors: tokenizer, pooling, company, and refusals."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="what the vectors are compared with runs in torch")
transformers = pytest.importorskip("transformers", reason="it is what the vectors are compared with")
tokenizers = pytest.importorskip("tokenizers", reason="it is what the ids are compared with")

from bundle_models import write_model  # noqa: E402

from roofline import LLM  # noqa: E402
from roofline.bundle import compile_model, load  # noqa: E402
from roofline.common.errors import ConfigError, RooflineError, UnsupportedError  # noqa: E402
from tests.models.parity_cases import ENCODERS, encoder_of  # noqa: E402

if TYPE_CHECKING:
    from library_binding import Library

WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "dog", "ran", "far", "##s"),
    *("##ing", ".", ",", *"abcdefghi"),
]
WORDS += [f"##{letter}" for letter in "abcdefghi"]
CONFIG = ENCODERS["bert"].config
TEXTS = ["The cat sat on a mat.", "dogs", "", "the " * 198, "Sitting, ran far; unknowable", "cats " * 50, "a b c"]


def write_encoder(path: Path, pooling: str = "", **fields: Any) -> Path:
    """A folder with weights, a tokenizer and, where there is a pooling, sentence-transformers' files."""
    encoder_of(CONFIG | fields).save_pretrained(path)
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(path / "tokenizer.json"))
    if pooling:
        modes = dict.fromkeys(("cls_token", "mean_tokens", "max_tokens", "lasttoken"), False)
        write(path / "1_Pooling" / "config.json", {f"pooling_mode_{mode}": mode == pooling for mode in modes})
        kinds = "Transformer", "Pooling", "Normalize"
        write(
            path / "modules.json",
            [{"idx": i, "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)],
        )
    return path


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"), "cls_token")


def expected(ids: list[int], pooling: str) -> np.ndarray:
    with torch.no_grad():
        rows = encoder_of(CONFIG)(torch.tensor([ids])).last_hidden_state[0]
    vector = {"first": rows[0], "last": rows[-1], "mean": rows.mean(0)}[pooling]
    return torch.nn.functional.normalize(vector, dim=0).numpy()  # type: ignore[no-any-return]


def test_vectors_in_company_are_those_of_transformers(folder: Path) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with LLM(str(folder), max_batch_tokens=256) as llm:
        for pooling in (None, "first", "mean", "last"):
            together = llm.embed(TEXTS, pooling=pooling)
            for text, vector in zip(TEXTS, together, strict=True):
                ids = llm.encode(text)
                assert ids == theirs.encode(text).ids
                np.testing.assert_allclose(vector, expected(ids, pooling or "first"), atol=2e-3)
                (alone,) = llm.embed(text, pooling=pooling)
                assert alone.tobytes() == vector.tobytes()
        near, far = llm.score(TEXTS[0], ["the cat sat on the mat", "dogs ran"])
        assert far < near < 1
        assert llm.stats().prefix_hits == 0


@pytest.mark.parametrize("arithmetic", ["cpu", "plain"])
def test_the_reference_gives_the_same_vectors(folder: Path, arithmetic: str) -> None:
    with LLM(str(folder)) as fast, LLM(str(folder), backend="reference", arithmetic=arithmetic) as slow:
        for ours, theirs in zip(fast.embed(TEXTS[:3]), slow.embed(TEXTS[:3]), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6 if arithmetic == "cpu" else 2e-3)


@pytest.mark.parametrize(
    ("written", "kind"), [("", "mean"), ("cls_token", "first"), ("mean_tokens", "mean"), ("lasttoken", "last")]
)
@pytest.mark.usefixtures("home")
def test_the_pooling_of_the_files_also_from_a_bundle(written: str, kind: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "model", written)
    assert load(str(path)).pooling == kind
    assert load(str(path)).pooling == kind  # from the cache
    assert load(str(compile_model(str(path), tmp_path / "bundle").path)).pooling == kind
    assert load(str(path), backend="reference").pooling == kind


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_vectors_that_we_do_not_make_are_refused(backend: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "model", "max_tokens")
    with pytest.raises(UnsupportedError, match=r"config\.json: pooling_mode_max_tokens is not supported"):
        load(str(path), backend=backend)
    write(path / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True})
    with pytest.raises(UnsupportedError, match="pooling_mode_cls_token, pooling_mode_mean_tokens"):
        load(str(path), backend=backend)
    write(path / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    write(path / "modules.json", [{"type": "sentence_transformers.models.Dense"}])
    with pytest.raises(UnsupportedError, match=r"modules\.json: module sentence_transformers\.models\.Dense"):
        load(str(path), backend=backend)
    (path / "modules.json").write_text("[")
    with pytest.raises(ConfigError, match=r"modules\.json: file: is not JSON"):
        load(str(path), backend=backend)


def test_a_model_that_generates_follows_its_files_where_it_can(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    assert load(str(model), backend="reference").pooling == "last"
    write(model / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    assert load(str(model), backend="reference").pooling == "mean"
    write(model / "modules.json", [{"type": "sentence_transformers.models.Dense"}])
    assert load(str(model), backend="reference").pooling == "last"


def test_texts_that_are_too_long_name_what_bounds_them(folder: Path) -> None:
    with LLM(str(folder)) as llm, pytest.raises(RooflineError, match="201 tokens, 200 are available"):
        llm.embed([[5] * 201])
    with LLM(str(folder), max_batch_tokens=64) as llm, pytest.raises(RooflineError, match=r"64 are .*max_batch_tokens"):
        llm.embed([[5] * 65])


def test_several_ranks_are_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="an encoder model on several ranks"):
        load(str(folder), tensor_parallel=2)


def test_libroofline_refuses_an_encoder(folder: Path, tmp_path: Path, library: "Library") -> None:
    import library_binding as lb

    bundle = compile_model(str(folder), tmp_path / "bundle").path
    status, message = library.refused(bundle)
    assert status == lb.UNSUPPORTED
    assert "is an encoder model, which gives vectors of texts and generates none" in message
