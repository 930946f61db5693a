"""Bundles made on first use: made once, right for the source and the build, bounded, listed and removed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bundle_models import write_model

from roofline.bundle import bundle_cache as cached
from roofline.bundle import load
from roofline.bundle.loader import load_text_of
from roofline.bundle.manifest import BundleError
from roofline.bundle.reader import verify
from roofline.common import env

CLI = "import sys; from roofline.cli.main import main; sys.exit(main())"


def bundles() -> list[Path]:
    return sorted(entry.path for entry in cached.entries())


def test_compiled_on_first_use_and_used_afterwards(model: Path, home: Path, capfd: Any) -> None:
    first = load(str(model))
    said = capfd.readouterr().err
    assert f"Compiled {model} in " in said
    (path,) = bundles()
    assert path.parent == home / "bundles"
    second = load(str(model))
    load_text_of(str(model))
    assert capfd.readouterr().err == ""
    assert str(path) in second.notes["weights"]
    assert first.executable.fingerprint == second.executable.fingerprint
    assert (first.name, first.path) == (str(model), model)


def test_switched_off(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFLINE_BUNDLES", "off")
    assert "weights" not in load(str(model)).notes
    assert bundles() == []


def test_a_changed_source_and_another_build_are_compiled_anew(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(str(model), text=False).executable.fingerprint
    write_model(model, seed=5)
    assert load(str(model), text=False).executable.fingerprint != before
    assert len(bundles()) == 2
    for build in ("a", "b", "c"):
        monkeypatch.setattr("roofline._native.build_id", lambda build=build: build)
        load(str(model), text=False)
        assert len(bundles()) == 2  # bounded


def _changed_unseen(file: Path, at: int = -1) -> None:
    """Change a byte of a file, which keeps its size and the time of its last change."""
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("named", ["folder", "file"])
def test_a_change_of_any_file_is_noticed_whatever_its_size_and_time_say(named: str, model: Path) -> None:
    for name in ("generation_config.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json"):
        (model / name).write_text("{}" + " " * (3 << 16))
    source = model if named == "folder" else model / "model.safetensors"
    if named == "folder":
        (model / "model.safetensors.index.json").write_text("{}")
        (model / "model-00002-of-00002.safetensors").write_bytes(bytes(3 << 16))
        (model / "adapter_config.json").write_text("{}")
    keys = {cached.key_of(source)}
    files = sorted(model.iterdir())
    assert len(files) >= (10 if named == "folder" else 7)
    for number, file in enumerate(files):
        _changed_unseen(file)
        keys.add(cached.key_of(source))
        assert len(keys) == number + 2, file.name


def test_a_change_of_any_part_of_a_split_file_is_noticed(tmp_path: Path) -> None:
    parts = [tmp_path / f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.write_bytes(bytes(100))
    keys = {cached.key_of(parts[0])}
    for part in parts:
        _changed_unseen(part)
        keys.add(cached.key_of(parts[0]))
    assert len(keys) == 4
    parts[2].unlink()
    assert cached.key_of(parts[0]) not in keys


def test_of_a_large_file_parts_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "WHOLE", 1 << 18)
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1 << 20))
    keys = {cached.key_of(file)}
    for at in (0, cached.HEAD - 1, 1 << 19, (1 << 20) - 1):
        _changed_unseen(file, at)
        keys.add(cached.key_of(file))
    assert len(keys) == 5
    _changed_unseen(file, 3 << 15)  # what lies between the places is told by size and time
    assert cached.key_of(file) in keys
    file.write_bytes(bytes(1 << 20))
    assert cached.key_of(file) not in keys


def test_a_configuration_beside_a_named_file_is_part_of_it(model: Path, home: Path) -> None:
    file = model / "model.safetensors"
    before = load(str(file), text=False).executable.fingerprint
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"rope_theta": 50000.0}))
    assert load(str(file), text=False).executable.fingerprint != before


def test_bundles_whose_source_has_gone_are_removed(tmp_path: Path, home: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    load(str(one), text=False)
    (one / "config.json").unlink()
    (one / "model.safetensors").rename(tmp_path / "moved")
    for file in one.iterdir():
        file.unlink()
    one.rmdir()
    load(str(two), text=False)
    assert [entry.source for entry in cached.entries()] == [two]


@pytest.mark.parametrize("spoil", ["cut", "manifest", "missing", "foreign"])
def test_a_damaged_one_is_compiled_again_with_the_reason(model: Path, home: Path, capfd: Any, spoil: str) -> None:
    wanted = load(str(model), text=False).executable.fingerprint
    (path,) = bundles()
    if spoil == "cut":
        os.truncate(path / "weights.bin", 1000)
    elif spoil == "manifest":
        raw = bytearray((path / "manifest.json").read_bytes())
        raw[300] ^= 1
        (path / "manifest.json").write_bytes(raw)
    elif spoil == "missing":
        (path / "code.bin").unlink()
    else:
        raw = bytearray((path / "code.bin").read_bytes())
        raw[24] += 1
        (path / "code.bin").write_bytes(raw)
    capfd.readouterr()
    assert load(str(model), text=False).executable.fingerprint == wanted
    assert f"Compiling {model} again: " in capfd.readouterr().err
    load(str(model), text=False)
    assert capfd.readouterr().err == ""


def test_one_with_changed_weights_is_refused_by_the_start_that_finds_it_and_compiled_again_by_the_next(
    model: Path, home: Path, capfd: Any
) -> None:
    load(str(model), text=False)
    (path,) = bundles()
    raw = bytearray((path / "weights.bin").read_bytes())
    raw[20_000] ^= 1
    (path / "weights.bin").write_bytes(raw)
    with pytest.raises(BundleError, match=r"weights\.bin is not as it was written"):
        load(str(model), text=False, check_weights="first")
    capfd.readouterr()
    load(str(model), text=False, check_weights="first")
    assert f"Compiling {model} again: weights.bin is not as it was written: its hash is wrong" in capfd.readouterr().err
    verify(path)


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    home.write_text("a file where the folder should be")
    assert "weights" not in load(str(model), text=False).notes
    assert "is loaded without a bundle" in caplog.text


def test_of_the_processes_of_a_server_one_says_that_the_cache_cannot_be_written(
    model: Path, home: Path, caplog: Any
) -> None:
    home.write_text("a file where the folder should be")
    load_text_of(str(model))
    for replica in range(2):
        load(str(model), text=False, replica=(replica, 2))
    assert caplog.text.count("is loaded without a bundle") == 1


def test_two_processes_compile_once(model: Path, home: Path) -> None:
    code = f"from roofline.bundle import load; print(load({str(model)!r}, text=False).executable.fingerprint)"
    command = [sys.executable, "-c", code]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
        for _ in range(2)
    ]
    results = [process.communicate(timeout=60) for process in both]
    assert len({out for out, _ in results}) == 1
    assert "".join(said for _, said in results).count("Compiled") == 1


def test_list_and_rm(model: Path, home: Path) -> None:
    def roofline(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", CLI, *words], capture_output=True, text=True, timeout=60, env=os.environ.copy()
        )

    load(str(model), text=False)
    (path,) = bundles()
    (entry,) = json.loads(roofline("list", "--json").stdout)
    assert (entry["path"], entry["source"]) == (str(path), str(model))
    assert path.name[:10] in roofline("list").stdout
    done = roofline("rm", str(model))
    assert done.returncode == 0, done.stderr
    assert bundles() == []
    done = roofline("rm", str(model))
    assert done.returncode == 1
    assert env.home() == home


def test_removing_a_model_removes_its_bundles(model: Path, home: Path) -> None:
    from dataclasses import asdict

    from roofline.weights import sources

    entry = sources.catalog()["smollm2-135m"]
    folder = home / "models" / entry.name
    folder.mkdir(parents=True)
    shape = {"name": entry.name, "source": "x", "file": "", "sha256": "", "size": 1, "licence": "x", "pulled_at": "x"}
    write_model(folder)
    (folder / "manifest.json").write_text(json.dumps(asdict(sources.StoredModel(**shape))))
    load(entry.name, text=False)
    (found,) = list(cached.entries())
    assert found.source == folder
    command = [sys.executable, "-c", CLI, "list", "--json"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, env=os.environ.copy()).stdout)
    assert listed[0]["bundle_bytes"] == found.nbytes
    subprocess.run([sys.executable, "-c", CLI, "rm", entry.name], check=True, env=os.environ.copy())
    assert not folder.exists()
    assert bundles() == []


def test_the_text_side_of_another_backend_compiles_nothing(model: Path, home: Path) -> None:
    load_text_of(str(model), "gpu")
    assert not home.exists()
    load_text_of(str(model))
    assert home.exists()


def test_a_compilation_that_takes_long_says_how_much_disk_and_time_it_needs() -> None:
    times, lines = iter([100.0, 100.9, 101.0, 105.9, 106.0]), list[str]()
    report = cached.progress_lines(Path("m.gguf"), Path("/bundles/m-1"), lines.append, lambda: next(times))
    for done in (10, 20, 60, 80):  # the first and the third come too early
        report(done * 1_000_000, 100_000_000)
    assert lines == [
        "Compiling m.gguf for its first use here: 100 MB of disk in /bundles, 20% done, about 4 s left",
        "Compiling m.gguf for its first use here: 100 MB of disk in /bundles, 80% done, about 2 s left",
    ]


def test_a_first_use_says_how_far_it_is(model: Path, home: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "FIRST_LINE_SECONDS", 0.0)
    load(str(model), text=False)
    assert f"Compiling {model} for its first use here: " in capfd.readouterr().err
