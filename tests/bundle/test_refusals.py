"""What cannot be loaded says why, names the file, and does so before the weights are read."""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bundle_models import tokenizer_json, write_model

from roofline import LLM, SamplingParams
from roofline.bundle import load, load_text_of, writer
from roofline.common.errors import ConfigError, RooflineError, UnsupportedError


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Who waits for a pipe is woken, and fails."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("name", ["model.gguf", "config.json", "model.safetensors"])
@pytest.mark.usefixtures("home")
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, model: Path, tmp_path: Path) -> None:
    place = tmp_path / name if name == "model.gguf" else model / name
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    source = place if name == "model.gguf" else model
    for what in (load, load_text_of if name == "model.gguf" else load):
        with pytest.raises(ConfigError, match=rf"{name}: cannot be read: it is a folder, a pipe or a device"):
            what(str(source))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_no_model(path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        load(path)


@pytest.mark.parametrize("name", ["manifest.json", "code.bin", "weights.bin"])
def test_a_pipe_in_a_bundle_is_not_waited_for(name: str, bundle: Path) -> None:
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    with pytest.raises(ConfigError, match=name):
        load(str(bundle))


def _as_nobody(call: Callable[[], object]) -> str:
    """What a call raises where root's rights are gone, in a child process; a raw error is marked as such."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setuid(65534)
            call()
            text = "nothing was raised"
        except RooflineError as error:
            text = str(error)
        except BaseException as error:
            text = f"raw {type(error).__name__}: {error}"
        os.write(send, text.encode())
        os._exit(0)
    os.close(send)
    with open(receive, encoding="utf-8") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root may give up its rights")
@pytest.mark.parametrize("closed", [".", "model.safetensors", "config.json", "..", "enter"])
def test_what_may_not_be_read_is_named(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(prefix="roofline-closed-"))
    try:
        folder.chmod(0o755)
        home = folder / "home"
        home.mkdir()
        home.chmod(0o777)
        monkeypatch.setenv("ROOFLINE_HOME", str(home))
        model = write_model(folder / "outer" / "model")
        place = model if closed == "enter" else (model / closed).resolve()
        place.chmod(0o444 if closed == "enter" else 0)
        for bundles in ("on", "off"):
            monkeypatch.setenv("ROOFLINE_BUNDLES", bundles)
            for call in (lambda: load(str(model)), lambda: load_text_of(str(model))):
                text = _as_nobody(call)
                assert "cannot be read: permission is missing" in text, (closed, text)
                assert str(model) in text, (closed, text)
                assert not text.startswith("raw"), (closed, text)
    finally:
        shutil.rmtree(folder)


def _with_nan(model: Path, tensor: str, row: int) -> None:
    """One NaN in a tensor of a model of bfloat16."""
    path = model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + size])[tensor]
    at = 8 + size + entry["data_offsets"][0] + 2 * row * (entry["shape"][-1] if len(entry["shape"]) > 1 else 1)
    raw[at : at + 2] = (0x7FC0).to_bytes(2, "little")
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("tensor", "ours"),
    [
        ("model.layers.1.mlp.up_proj.weight", "layers.1.mlp.up.weight"),
        ("model.layers.0.input_layernorm.weight", "layers.0.attn_norm.weight"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nan_in_the_weights_is_found_when_an_answer_is_no_number(
    backend: str, tensor: str, ours: str, model: Path
) -> None:
    _with_nan(model, tensor, 20)
    with (
        LLM(str(model), backend=backend) as llm,
        pytest.raises(RooflineError, match=rf"tensor '{ours}' of the model holds NaN"),
    ):
        llm.generate("hello", SamplingParams(max_tokens=2))


@pytest.mark.usefixtures("home")
def test_nan_where_the_kernels_are_tried_is_not_blamed_on_them(model: Path) -> None:
    _with_nan(model, "model.embed_tokens.weight", 3)
    _with_nan(model, "model.layers.0.self_attn.q_proj.weight", 3)
    with pytest.raises(ConfigError, match=r"model: tensor '.*' holds NaN or infinity|model: tensor .*: holds NaN"):
        load(str(model), text=False)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("part", [{"model": {"type": "WordPiece", "vocab": {}}}, {"added_tokens": 3}, {"model": 3}])
def test_a_tokenizer_is_refused_before_the_weights_are_read(
    part: dict[str, object], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "tokenizer.json").write_text(json.dumps({**tokenizer_json(), **part}))
    monkeypatch.setattr(writer, "_write_image", lambda *_: pytest.fail("the weights were packed"))
    monkeypatch.setattr("roofline.backends.checkpoint.weights_hash", lambda _: pytest.fail("the weights were hashed"))
    for call in (lambda: load(str(model)), lambda: load_text_of(str(model))):
        with pytest.raises((ConfigError, UnsupportedError), match=r"model/tokenizer\.json"):
            call()
    monkeypatch.setenv("ROOFLINE_BUNDLES", "off")
    for backend in ("cpu", "reference"):
        made = f"roofline.backends.{backend}.backend.BACKEND"
        monkeypatch.setattr(f"{made}.make", lambda _: pytest.fail("the weights were read"))
        with pytest.raises((ConfigError, UnsupportedError), match=r"model/tokenizer\.json"):
            load(str(model), backend=backend)


def test_errors_of_families_templates_and_stored_tokenizers_name_the_file(model: Path, bundle: Path) -> None:
    (bundle / "tokenizer.bin").write_bytes(b"x" * (bundle / "tokenizer.bin").stat().st_size)
    with pytest.raises(ConfigError, match=r"bundle is a bundle that cannot be used: tokenizer\.bin"):
        load(str(bundle))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{% if %}"}))
    with pytest.raises(ConfigError, match=str(model)):
        load(str(model))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_multiplier": 2.0}))
    with pytest.raises(UnsupportedError, match=str(model)):
        load(str(model), text=False)


@pytest.mark.usefixtures("home")
def test_random_weights_need_a_configuration_and_for_texts_a_tokenizer(model: Path, tmp_path: Path) -> None:
    folder, options = tmp_path / "shape", {"weights": "random:7", "cache_tokens": 64, "threads": 1}
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    assert load(str(folder), text=False, **options).tokenizer is None
    for refused in (lambda: load(str(folder), **options), lambda: load_text_of(str(folder))):
        with pytest.raises(ConfigError, match=rf"^{folder}: there is no tokenizer\.json .* with random weights, too"):
            refused()
    with pytest.raises(ConfigError, match="preset:smollm2-135m is a shape without a tokenizer"):
        load("preset:smollm2-135m", **options)
    shutil.copy(model / "tokenizer.json", folder)
    words = load_text_of(str(model))[0]
    for source in (folder, folder / "config.json", model):
        tokenizer = load(str(source), **options).tokenizer
        assert tokenizer is not None
        assert tokenizer.encode("ab", add_special=False) == words.encode("ab", add_special=False)
