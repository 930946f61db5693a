"""The store: pull, list, rm, resolve, with pip and the hub replaced where they would reach out."""

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roofline.common.errors import CapacityError, ConfigError
from roofline.common.files import locked
from roofline.weights import download, sources, storage
from tests.command_line import call_roofline

MODEL = b"GGUF" + bytes(range(256)) * 5000  # 1.3 MB: more than one chunk
ENTRY = sources.CatalogEntry(
    name="tiny",
    about="a test's model",
    source="pypi:tiny-model==1.0",
    member="*.gguf",
    file="tiny.gguf",
    sha256=hashlib.sha256(MODEL).hexdigest(),
    size=len(MODEL),
    download_size=1000,
    licence="Apache-2.0",
)

REAL_CATALOG = sources.catalog


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store whose catalogue holds one tiny model."""
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sources, "catalog", lambda: {"tiny": ENTRY})
    return tmp_path / "home"


class FakePip:
    """Leaves a wheel where pip would; counts its calls."""

    def __init__(self, content: bytes = MODEL) -> None:
        self.content, self.calls, self.arguments = content, 0, [""]

    def __call__(self, arguments: list[str], temporary: Path) -> None:
        self.calls += 1
        self.arguments = arguments
        assert temporary.is_dir()
        folder = Path(arguments[arguments.index("-d") + 1])
        with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr("tiny_model/__init__.py", "")
            wheel.writestr("tiny_model/tiny.gguf", self.content)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(download, "run_pip", fake)
    return fake


def test_pull_list_and_remove(home: Path, pip: FakePip) -> None:
    assert sources.stored_path("tiny") is None
    assert sources.list_models() == []
    seen: list[tuple[str, int, int | None]] = []
    path = sources.pull("tiny", lambda *step: seen.append(step))
    assert path == home / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert pip.arguments[-1] == "tiny-model==1.0"
    assert {"--no-deps", "--only-binary=:all:"} <= set(pip.arguments)
    assert not any("index" in a or "://" in a for a in pip.arguments)
    assert seen[-1] == ("unpacking", len(MODEL), len(MODEL))
    assert sorted(p.name for p in path.parent.iterdir()) == ["manifest.json", "tiny.gguf"]
    (model,) = sources.list_models()
    assert (model.name, model.source, model.size, model.licence) == ("tiny", ENTRY.source, len(MODEL), "Apache-2.0")
    manifest = (path.parent / "manifest.json").read_text()
    assert json.loads(manifest)["sha256"] == ENTRY.sha256
    assert '\n "name": "tiny",\n' in manifest  # for people too
    assert sources.stored_path("tiny") == sources.resolve("tiny") == path
    assert sources.pull("tiny") == path
    assert pip.calls == 1  # nothing is done twice
    assert sources.remove("tiny") > len(MODEL)
    assert sources.stored_path("tiny") is None
    with pytest.raises(ConfigError, match="no model 'tiny'"):
        sources.remove("tiny")


def test_resolve_paths_names_and_mistakes(home: Path, pip: FakePip, tmp_path: Path) -> None:
    here = tmp_path / "x.gguf"
    here.write_bytes(b"x")
    assert sources.resolve(str(here)) == here
    assert sources.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"roofline pull tiny"):
        sources.resolve("tiny")
    with pytest.raises(ConfigError, match=r"Did you mean 'tiny'\?.*hf:ORG/REPO"):
        sources.resolve("tinny")
    with pytest.raises(ConfigError, match=r"no such file"):
        sources.resolve("./tiny.gguf")
    with pytest.raises(ConfigError, match=r"Did you mean 'tiny'"):
        sources.pull("tyny")
    assert sources.resolve("tiny", fetch=True).read_bytes() == MODEL


@pytest.mark.parametrize("call", [sources.resolve, sources.pull, sources.stored_path])
def test_presets_are_answered_with_presets(call: Callable[[str], object], home: Path) -> None:
    expected = r"no model preset 'mpt-8b'; did you mean 'mpt-7b'\? \(known: bamba-9b, codellama-13b, "
    with pytest.raises(ConfigError, match=expected):
        call("preset:mpt-8b")
    with pytest.raises(ConfigError, match="preset:mpt-7b is a shape without weights and tokenizer"):
        call("preset:mpt-7b")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        ".hidden",
        "a\0b",
        "hf:",
        "hf:a",
        "hf:../b",
        "hf:a/..",
        "hf:a/b:/etc/passwd",
        "hf:a/b:../c",
        "hf:a/b/c",
        "hf:a/b:",
    ],
)
def test_no_name_reaches_outside_the_store(home: Path, name: str) -> None:
    for act in (sources.pull, sources.remove, sources.stored_path):
        with pytest.raises(ConfigError):
            act(name)


def test_wrong_bytes_are_refused_and_fetched_anew(home: Path, pip: FakePip) -> None:
    pip.content = MODEL[:-1] + b"?"
    with pytest.raises(ConfigError, match="SHA-256 differs"):
        sources.pull("tiny")
    assert sources.stored_path("tiny") is None
    assert not list(home.rglob("*.part"))
    pip.content = MODEL + b"more"
    with pytest.raises(ConfigError, match=r"no single member \*\.gguf of"):
        sources.pull("tiny")
    pip.content = MODEL
    assert sources.pull("tiny").read_bytes() == MODEL
    assert pip.calls == 3


def test_a_stored_model_is_pulled_where_nothing_can_be_written(home: Path, pip: FakePip) -> None:
    path = sources.pull("tiny")
    shutil.rmtree(home / "locks")
    (home / "locks").write_text("")  # no lock can be made there, by root neither
    assert sources.pull("tiny") == path
    with pytest.raises(ConfigError, match=r"a part of the path is a file\. Set ROOFLINE_HOME to another folder\."):
        sources.remove("tiny")


def test_short_names_of_the_hub_stand_for_its_repositories(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot(repo: str, file: str, folder: Path, report: Any) -> SimpleNamespace:
        calls.append((repo, file))
        return SimpleNamespace(revision="abc", sha256="", size=3, licence="Apache-2.0")

    monkeypatch.setattr(download, "download_snapshot", snapshot)
    path = sources.pull("qwen3-0.6b")
    assert calls == [("Qwen/Qwen3-0.6B", "")]
    assert path == sources.stored_path("qwen3-0.6b") == sources.resolve("hf:Qwen/Qwen3-0.6B")
    assert [model.name for model in sources.list_models()] == ["hf:Qwen/Qwen3-0.6B"]
    sources.remove("qwen3-0.6b")
    assert sources.stored_path("hf:Qwen/Qwen3-0.6B") is None
    with pytest.raises(ConfigError, match=r"Did you mean 'qwen3-0\.6b'"):
        sources.resolve("qwen3-0.6")


def test_every_name_of_the_catalogue_is_one() -> None:
    names = [*REAL_CATALOG(), *sources.hub_names()]
    assert len(names) == len(set(names))
    for hub in sources.hub_names().values():
        assert all(download.split_hub_name(hub)[:1])


def test_wheel_of_an_interrupted_pull_is_used_again(home: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(download.os, "fsync", _interrupt)  # Ctrl-C while unpacking
        with pytest.raises(KeyboardInterrupt):
            sources.pull("tiny")
    assert sources.stored_path("tiny") is None
    assert not list(home.rglob("*.part"))
    assert sources.pull("tiny").read_bytes() == MODEL
    assert pip.calls == 1


def _interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_half_a_wheel_is_not_used(home: Path, pip: FakePip) -> None:
    leftover = home / "models" / "tiny" / ".download" / "tiny_model-1.0-py3-none-any.whl"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"PK\x03\x04half")
    assert sources.pull("tiny").read_bytes() == MODEL
    assert pip.calls == 1


def test_verified_file_without_manifest_is_kept(home: Path, pip: FakePip) -> None:
    path = sources.pull("tiny")
    (path.parent / "manifest.json").write_text("{ha")
    assert sources.stored_path("tiny") is None
    assert sources.list_models() == []
    assert sources.pull("tiny") == path
    assert pip.calls == 1
    path.write_bytes(MODEL[:-9])  # cut behind our back
    assert sources.stored_path("tiny") is None
    assert sources.pull("tiny").read_bytes() == MODEL
    assert pip.calls == 2


def test_full_disk_and_missing_permission_have_a_remedy(
    home: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(CapacityError, match=r"1,000 are available.*ROOFLINE_HOME"):
            sources.pull("tiny")
    full = r"\. Free some space, or set ROOFLINE_HOME to another folder\.$"
    other = r"\. Set ROOFLINE_HOME to another folder\.$"
    for code, cause in (
        (errno.ENOSPC, f"the disk is full{full}"),
        (errno.EDQUOT, f"the disk quota is used up{full}"),
        (errno.EACCES, f"permission is missing{other}"),
        (errno.EROFS, f"read-only{other}"),
    ):

        def fail(*arguments: Any, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(download.os, "fsync", fail)
            with pytest.raises(ConfigError, match=cause):
                sources.pull("tiny")
    assert not list(home.rglob("*.part"))


def _pull_in_child(ready: Any, results: Any) -> None:
    pip = FakePip()
    download.run_pip = pip
    sources.catalog = lambda: {"tiny": ENTRY}
    ready.wait()
    path = sources.pull("tiny")
    results.put((path.read_bytes() == MODEL, pip.calls))


def test_concurrent_pulls_download_once(home: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ready, results = fork.Event(), fork.Queue()
    children = [fork.Process(target=_pull_in_child, args=(ready, results)) for _ in range(4)]
    for child in children:
        child.start()
    ready.set()
    outcomes = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(60)
    assert all(right for right, _ in outcomes)
    assert sum(calls for _, calls in outcomes) == 1


def test_waiting_for_another_pull_is_reported(tmp_path: Path) -> None:
    class Waited(Exception):
        pass

    def waiting() -> None:
        raise Waited

    path = tmp_path / "l"
    with locked(path, lambda: None), pytest.raises(Waited), locked(path, waiting):
        raise AssertionError("the lock was taken twice")
    with locked(tmp_path / "l", waiting):
        pass


# --- pip itself --------------------------------------------------------------------------------------------------


def _python(tmp_path: Path, script: str) -> str:
    """An executable that stands in for the interpreter that runs pip."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_failing_pip_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", _python(tmp_path, "echo 'ERROR: no matching distribution'; exit 1"))
    with pytest.raises(ConfigError, match=r"(?s)pip download x==1 failed \(exit 1\).*pip config list.*no matching"):
        download.run_pip(["download", "x==1"], tmp_path)
    monkeypatch.setattr(sys, "executable", _python(tmp_path, "echo 'python: No module named pip' >&2; exit 1"))
    with pytest.raises(ConfigError, match="has no pip"):
        download.run_pip(["download", "x==1"], tmp_path)


def test_interrupted_pip_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", _python(tmp_path, "exec sleep 600"))
    started: list[subprocess.Popen] = []
    communicate = subprocess.Popen.communicate

    def interrupted(process: subprocess.Popen, *rest: Any, **options: Any) -> Any:
        started.append(process)
        monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download.run_pip(["download", "x==1"], tmp_path)
    assert started[0].returncode == -9


def test_progress_follows_the_growing_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePip()
    seen: list[tuple[str, int, int | None]] = []

    def slow(arguments: list[str], temporary: Path) -> None:
        (temporary / "pip-unpack").mkdir()
        (temporary / "pip-unpack" / "half").write_bytes(bytes(500))
        for _ in range(400):
            if seen:
                break
            download.threading.Event().wait(0.05)
        fake(arguments, temporary)

    monkeypatch.setattr(download, "run_pip", slow)
    sources.pull("tiny", lambda *step: seen.append(step))
    assert seen[0] == ("downloading", 500, 1000)


# --- the hub -----------------------------------------------------------------------------------------------------


class FakeHub:
    """A repository of small files behind huggingface_hub's names."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.revisions, self.taken = files, [""], [""]

    def HfApi(self) -> "FakeHub":
        return self

    def model_info(self, repo: str, files_metadata: bool) -> Any:
        if repo == "org/away":
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        if repo != "org/repo":
            raise OSError(f"404: {repo} does not exist\nmore lines")
        siblings = [
            SimpleNamespace(
                rfilename=name,
                size=len(content),
                lfs=SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if name.endswith("s") else None,
            )
            for name, content in self.files.items()
        ]
        return SimpleNamespace(siblings=siblings, sha="c0ffee", card_data={"license": "mit"})

    def snapshot_download(
        self, repo: str, revision: str, local_dir: Path, allow_patterns: list[str], tqdm_class: type
    ) -> None:
        self.revisions, self.taken = [revision], sorted(allow_patterns)
        for name in allow_patterns:
            (local_dir / name).write_bytes(self.files[name])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(
        {
            **{"model.safetensors": b"s" * 100, "config.json": b"{}", "tokenizer.json": b"{}", "README.md": b"#"},
            **{"pytorch_model.bin": b"pickle", "modeling.py": b"code", "consolidated.safetensors": b"t"},
            **{"onnx/model.safetensors": b"o", "tiny.gguf": b"GGUF", "tokenizer_config.json": b"{}"},
        }
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_hub_takes_the_safetensors_model_and_no_code(home: Path, hub: FakeHub) -> None:
    path = sources.pull("hf:org/repo")
    assert path == home / "models" / "hf--org--repo"
    assert hub.taken == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert hub.revisions == ["c0ffee"]
    (model,) = sources.list_models()
    assert (model.name, model.source, model.licence, model.size) == ("hf:org/repo", "hf:org/repo@c0ffee", "mit", 106)
    assert sources.stored_path("hf:org/repo") == path
    files = sources.find_tokenizer_files(path)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    assert sources.find_tokenizer_files(path / "model.safetensors") == files
    sources.remove("hf:org/repo")
    assert not path.exists()


def test_hub_takes_one_file(home: Path, hub: FakeHub) -> None:
    path = sources.pull("hf:org/repo:tiny.gguf")
    assert path == home / "models" / "hf--org--repo--tiny.gguf" / "tiny.gguf"
    assert path.read_bytes() == b"GGUF"
    assert sources.list_models()[0].sha256 == hashlib.sha256(b"GGUF").hexdigest()
    assert sources.find_tokenizer_files(path) == {}


def test_hub_failures_name_the_repository(home: Path, hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match=r"hf:org/gone: OSError: 404: org/gone does not exist$"):
        sources.pull("hf:org/gone")
    with pytest.raises(ConfigError, match=r"hf:org/away: ConnectionRefusedError: Connection refused$"):
        sources.pull("hf:org/away")
    with pytest.raises(ConfigError, match=r"hf:org/repo has no nothing\.gguf"):
        sources.pull("hf:org/repo:nothing.gguf")
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(ConfigError, match="no safetensors model"):
        sources.pull("hf:org/repo")
    assert sources.list_models() == []


def test_hub_file_with_the_wrong_hash_is_refused(home: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    right = dict(hub.files)

    def wrong(repo: str, local_dir: Path, allow_patterns: list[str], **rest: Any) -> None:
        for name in allow_patterns:
            (local_dir / name).write_bytes(right[name][::-1] if name == "config.json" else right[name].upper())

    monkeypatch.setattr(hub, "snapshot_download", wrong)
    with pytest.raises(ConfigError, match=r"model\.safetensors.*SHA-256"):
        sources.pull("hf:org/repo")
    assert sources.stored_path("hf:org/repo") is None


# --- the real ones -----------------------------------------------------------------------------------------------


def test_catalogue_is_whole() -> None:
    entries = sources.catalog()
    assert sources.DEFAULT_MODEL in entries
    for name, entry in entries.items():
        assert entry.name == name
        assert entry.source.startswith("pypi:")
        assert "==" in entry.source
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.size > 0
        assert entry.licence


def test_catalogue_entry_is_the_file_tests_use(smollm2_path: Path) -> None:
    entry = sources.catalog()["smollm2-135m"]
    assert smollm2_path.stat().st_size == entry.size
    assert storage.sha256_of(smollm2_path, lambda done: None) == entry.sha256


def test_commands_pull_list_and_remove(home: Path, pip: FakePip) -> None:
    assert "tiny" in call_roofline(["list"]).output
    pulled = call_roofline(["pull", "tiny"])
    assert pulled.exit_code == 0, pulled.output
    assert "tiny is in" in pulled.output
    (listed,) = json.loads(call_roofline(["list", "--json"]).output)
    assert listed["name"] == "tiny"
    assert Path(listed["path"]).read_bytes() == MODEL
    assert "1.2 MiB" in call_roofline(["list"]).output
    assert "removed tiny" in call_roofline(["rm", "tiny"]).output
    assert sources.list_models() == []


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_default_model_can_be_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    from roofline.weights.checkpoint import open_checkpoint

    try:
        path = sources.pull(sources.DEFAULT_MODEL)
    except ConfigError as error:
        if "index reachable" in str(error):
            pytest.skip(f"no package index: {error}")
        raise
    assert open_checkpoint(path).config["layers"] == 30
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_an_empty_name_is_named_as_such():
    with pytest.raises(ConfigError, match="the name of the model is empty"):
        sources.resolve("")


def test_a_repository_s_name_without_its_prefix_is_told_the_prefix():
    with pytest.raises(ConfigError, match=r"Org/Repo: .*; a repository of Hugging Face is named hf:Org/Repo$"):
        sources.resolve("Org/Repo")
    with pytest.raises(ConfigError, match=r"there is no such file or folder$"):
        sources.resolve("./Org/Repo")


# --- numbers and limits --------------------------------------------------------------------------------------------


def test_just_enough_space_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    storage.need_space(tmp_path, 1000, "it")
    with pytest.raises(CapacityError, match=r"it in .*1,001"):
        storage.need_space(tmp_path, 1001, "it")


def test_a_wheel_needs_room_for_two_of_it_and_its_file(
    home: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 2 * ENTRY.download_size + ENTRY.size
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(CapacityError, match=f"{needed:,}"):
        sources.pull("tiny")
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    assert sources.pull("tiny").read_bytes() == MODEL


def test_hashes_and_folders_are_counted_in_bytes(tmp_path: Path) -> None:
    content = bytes(range(250)) * 10_000  # 2.5 MB
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(content)
    (tmp_path / "other").write_bytes(b"12345")
    seen: list[int] = []
    assert storage.sha256_of(tmp_path / "inner" / "file", seen.append) == hashlib.sha256(content).hexdigest()
    assert seen == sorted(seen)
    assert len(seen) > 1
    assert seen[-1] == len(content)
    assert storage.folder_bytes(tmp_path) == len(content) + 5
    assert storage.folder_bytes(tmp_path / "gone") == 0


def test_a_hub_model_needs_room_for_what_is_not_there_yet(
    home: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "models" / "hf--org--repo"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=103))
    with pytest.raises(CapacityError, match=r"hf:org/repo in .*104"):
        sources.pull("hf:org/repo")
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=104))
    seen: list[tuple[str, int, int | None]] = []
    sources.pull("hf:org/repo", lambda *step: seen.append(step))
    (folder / "manifest.json").unlink()
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    sources.pull("hf:org/repo")  # all of it is there
    verified = [step for step in seen if step[0] == "verifying"]
    # By name: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.
    assert verified == [("verifying", done, 106) for done in (2, 102, 104, 106)]


def test_what_is_verified_again_is_reported(home: Path, pip: FakePip) -> None:
    path = sources.pull("tiny")
    (path.parent / "manifest.json").unlink()
    seen: list[tuple[str, int, int | None]] = []
    sources.pull("tiny", lambda *step: seen.append(step))
    assert seen[-1] == ("verifying", ENTRY.size, ENTRY.size)
    assert {step[0] for step in seen} == {"verifying"}


def test_a_member_is_unpacked_whole_or_the_archive_is_deleted(tmp_path: Path) -> None:
    content = bytes(range(250)) * 10_000
    archive, target = tmp_path / "a.whl", tmp_path / "a.gguf"
    seen: list[int] = []

    def unpack(size: int) -> None:
        sha256 = hashlib.sha256(content).hexdigest()
        download.extract([archive], "*.gguf", target, size, sha256, lambda stage, done, total: seen.append(done))

    def pack(raw: bytes = b"") -> None:
        with zipfile.ZipFile(archive, "w") as wheel:
            wheel.writestr("a.gguf", content)
        archive.write_bytes(archive.read_bytes().replace(content[:1000], raw, 1) if raw else archive.read_bytes())

    pack()
    unpack(len(content))
    assert target.read_bytes() == content
    assert seen[-1] == len(content)
    assert archive.exists()
    target.unlink()
    with pytest.raises(ConfigError, match=r"a\.whl: no single member \*\.gguf of at most 2499999 bytes"):
        unpack(len(content) - 1)
    pack(bytes(1000))  # the zip's own checksum differs
    with pytest.raises(ConfigError, match=r"a\.whl: damaged \(.*CRC.*\); pull again"):
        unpack(len(content))
    assert not list(tmp_path.iterdir())


def test_two_members_of_a_pattern_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a.gguf", b"x")
        wheel.writestr("b.gguf", b"x")
    with pytest.raises(ConfigError, match=r"a\.whl: no single member \*\.gguf of at most 1 bytes"):
        download.extract([tmp_path / "a.whl"], "*.gguf", tmp_path / "a.gguf", 1, "", lambda *step: None)


def test_a_file_in_pieces_is_put_together_in_order(tmp_path: Path) -> None:
    pieces, wheels = (b"first", b"second", b"third"), []
    for number, piece in enumerate(pieces):
        wheels.append(tmp_path / f"{number}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as wheel:
            wheel.writestr(f"x/data/a.gguf.part0{number}", piece)
    whole, target = b"".join(pieces), tmp_path / "a.gguf"
    seen: list[int] = []

    def unpack(archives: list[Path], size: int) -> None:
        sha256 = hashlib.sha256(whole).hexdigest()
        download.extract(archives, "*.part0*", target, size, sha256, lambda stage, done, total: seen.append(done))

    unpack(wheels, len(whole))
    assert target.read_bytes() == whole
    assert seen == [5, 11, 16]
    target.unlink()
    with pytest.raises(ConfigError, match=r"2\.whl: no single member \*\.part0\* of at most 4 bytes"):
        unpack(wheels, len(whole) - 1)
    assert not list(tmp_path.iterdir())


def test_pieces_of_another_file_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "0.whl", "w") as wheel:
        wheel.writestr("a.gguf.part00", b"short")
    with pytest.raises(ConfigError, match=r"0\.whl: \*\.part0\* is not the file expected \(size or SHA-256 differs\)"):
        download.extract([tmp_path / "0.whl"], "*.part0*", tmp_path / "a.gguf", 9, "", lambda *step: None)


def test_the_end_of_what_pip_says_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", _python(tmp_path, "seq 1 20; env | grep ^TMPDIR; exit 3"))
    with pytest.raises(ConfigError) as caught:
        download.run_pip(["download", "x==1"], tmp_path)
    lines = [*map(str, range(16, 21)), f"TMPDIR={tmp_path}"]
    assert str(caught.value).endswith("pip said:\n  " + "\n  ".join(lines))


def test_a_folder_has_one_whole_wheel_or_none(tmp_path: Path) -> None:
    assert download._complete_wheel(tmp_path / "gone") is None
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a", b"x")
    assert download._complete_wheel(tmp_path) == tmp_path / "a.whl"
    shutil.copy(tmp_path / "a.whl", tmp_path / "b.whl")
    assert download._complete_wheel(tmp_path) is None


def test_pip_that_leaves_no_wheel_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "run_pip", lambda arguments, temporary: None)
    with pytest.raises(ConfigError, match=r"pip download tiny-model==1\.0 left no wheel in "):
        sources.pull("tiny")


def test_names_that_are_far_from_all_get_no_hint(home: Path) -> None:
    for name, is_near in (("tin", True), ("tixx", True), ("xxxxny", True), ("xxxxxxxy", False), ("qqqq", False)):
        with pytest.raises(ConfigError) as caught:
            sources.pull(name)
        assert ("Did you mean 'tiny'?" in str(caught.value)) == is_near, name


def test_a_stored_folder_or_file_that_is_gone_is_not_stored(home: Path, hub: FakeHub) -> None:
    file, folder = sources.pull("hf:org/repo:tiny.gguf"), sources.pull("hf:org/repo")
    assert [model.name for model in sources.list_models()] == ["hf:org/repo", "hf:org/repo:tiny.gguf"]
    file.write_bytes(b"GGUF and more")
    assert sources.stored_path("hf:org/repo:tiny.gguf") is None
    file.unlink()
    assert sources.stored_path("hf:org/repo:tiny.gguf") is None
    assert sources.stored_path("hf:org/repo") == folder
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert sources.remove("hf:org/repo") == size


def test_a_path_that_is_neither_a_file_nor_a_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"model\.gguf: cannot be read: it is a folder, a pipe or a device"):
        sources.resolve(str(tmp_path / "model.gguf"))


def test_a_path_that_cannot_be_a_repository_gets_no_hint() -> None:
    for path in ("/Org/Repo", "~Org/Repo", "a/b/c", "./Repo"):
        with pytest.raises(ConfigError, match=r"there is no such file or folder$"):
            sources.resolve(path)
    with pytest.raises(ConfigError, match=r"^gone\.safetensors: there is no such file or folder$"):
        sources.resolve("gone.safetensors")


def test_pieces_that_the_hub_will_not_use_are_removed_before_it_is_asked(
    home: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = home / "models" / "hf--org--repo" / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for name in ("hash.etag.0123abcd.incomplete", "hash.etag.incomplete", "hash.etag.0123abcd.metadata"):
        (notes / name).write_bytes(b"half")
    there: list[str] = []
    download_of = hub.snapshot_download

    def snapshot_download(*arguments: Any, **options: Any) -> None:
        there.extend(sorted(path.name for path in notes.iterdir()))
        download_of(*arguments, **options)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    path = sources.pull("hf:org/repo")
    assert there == ["hash.etag.0123abcd.metadata", "hash.etag.incomplete"]
    assert not (path / ".cache").exists()
