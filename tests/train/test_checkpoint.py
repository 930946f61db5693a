"""Checkpoints: whole or not there, what was written or refused by name, and gone on from however a run ended."""

import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.checkpoint import checkpoint, manifest, state  # noqa: E402
from roofline.train.checkpoint.checkpoint import Saver, load, prune  # noqa: E402
from roofline.train.checkpoint.manifest import MANIFEST, facts, folder, open_place, steps  # noqa: E402
from roofline.train.data.receipts import RECEIPTS, read, verify  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from roofline.train.storage.local import LocalStore  # noqa: E402
from roofline.train.storage.store import Entry, StoreError  # noqa: E402
from tests.train import small  # noqa: E402
from tests.train.forks import run_forked  # noqa: E402
from tests.train.small import config, digest, log_of, mapping, steps_of, stored, write_rows  # noqa: E402

SAID = {"step": 3, "receipt": "00", "nested": [1, {"a": 0.1}], "none": None}


def some() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "model.a": torch.randn(5, 3),
        "model.b": torch.randn(7).bfloat16(),
        "model.c": torch.randn(4, 2, 3).half(),
        "model.flat": torch.randn(6, 4).t(),  # not contiguous
        "optimizer.a.step": torch.tensor(3.0),
        "optimizer.none": torch.empty(0, 4),
        "random": torch.arange(9, dtype=torch.uint8),
        "long": torch.tensor([1 << 40, -3]),
        "bits": torch.tensor([True, False]),
        "double": torch.tensor([0.1], dtype=torch.float64),
    }


def empty() -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in some().items()}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "checkpoints")


def test_what_was_saved_is_loaded(store: LocalStore, tmp_path: Path) -> None:
    small.save(store, 3, some(), SAID)
    found = empty()
    load(store, 3, found)
    for name, tensor in some().items():
        assert torch.equal(found[name], tensor), name
    assert facts(store, 3) == SAID
    assert steps(store) == [3]
    names = sorted(path.name for path in (tmp_path / "checkpoints" / "step-00000003").iterdir())
    assert len(names) == 2
    assert names[1] == MANIFEST


def test_a_part_of_it_may_be_loaded_and_in_another_precision(store: LocalStore) -> None:
    small.save(store, 3, some(), SAID)
    found = {"model.a": torch.zeros(5, 3, dtype=torch.bfloat16), "model.b": torch.zeros(7)}
    load(store, 3, found)
    assert torch.equal(found["model.a"], some()["model.a"].bfloat16())
    assert torch.equal(found["model.b"], some()["model.b"].float())


def test_names_of_places(tmp_path: Path) -> None:
    place, step = open_place(str(tmp_path / "a" / "step-00000200"))
    assert (place.url, step) == (str(tmp_path / "a"), 200)
    place, step = open_place(str(tmp_path / "a") + "/")
    assert (place.url.rstrip("/"), step) == (str(tmp_path / "a"), None)
    assert open_place("step-123456789")[1] == 123456789
    assert folder(123456789) == "step-123456789"
    assert open_place("s3://bucket/run/step-00000007")[1] == 7


def refused(store: LocalStore, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(store, 3, empty())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name, tensor in some().items() if tensor.nbytes])
def test_one_other_bit_in_a_tensor_is_found_and_named(store: LocalStore, tmp_path: Path, name: str) -> None:
    small.save(store, 3, some(), SAID)
    place = tmp_path / "checkpoints" / "step-00000003"
    piece = json.loads((place / MANIFEST).read_text())["tensors"][name]["pieces"][0]
    data = bytearray((place / piece["file"]).read_bytes())
    data[piece["start"] + piece["bytes"] // 2] ^= 16
    (place / piece["file"]).write_bytes(data)
    refused(store, rf"step-00000003/{piece['file']} is damaged: {name} is not what was written")
    others = {key: tensor for key, tensor in empty().items() if key != name}
    load(store, 3, others)


def test_a_piece_that_is_cut_or_missing_is_named(store: LocalStore, tmp_path: Path) -> None:
    small.save(store, 3, some(), SAID)
    path = next((tmp_path / "checkpoints" / "step-00000003").glob("*.bin"))
    path.write_bytes(path.read_bytes()[:-1])
    refused(store, rf"{path.name} ends before byte")
    path.unlink()
    refused(store, rf"{path.name} is missing")


def test_any_other_byte_of_a_manifest_is_found(store: LocalStore, tmp_path: Path) -> None:
    small.save(store, 3, {"a": torch.zeros(2, 2)}, SAID)
    path = tmp_path / "checkpoints" / "step-00000003" / MANIFEST
    good = path.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match=r"manifest\.json is (damaged|of another)"):
            facts(store, 3)
    for text in (b"", b"[]", b"{}", b"null", good[:-1], b'{"xxh3": "0"}'):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=r"manifest\.json is damaged"):
            facts(store, 3)


def test_another_versions_manifest_is_refused(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "VERSION", 2)
    small.save(store, 3, some(), SAID)
    monkeypatch.undo()
    refused(store, "of another version")


def test_without_a_manifest_there_is_no_checkpoint(store: LocalStore, tmp_path: Path) -> None:
    small.save(store, 2, some(), SAID)
    small.save(store, 3, some(), SAID)
    (tmp_path / "checkpoints" / "step-00000003" / MANIFEST).unlink()
    assert steps(store) == [2]
    refused(store, r"has no complete checkpoint of step 3: manifest\.json is missing")


def test_what_is_missing_or_of_another_shape_is_named(store: LocalStore) -> None:
    small.save(store, 3, some(), SAID)
    with pytest.raises(ConfigError, match=r"step-00000003 has no model\.z: it is of another model or optimizer"):
        load(store, 3, empty() | {"model.z": torch.zeros(2)})
    for other in (torch.zeros(3, 5), torch.zeros(5), torch.zeros(5, 4)):
        with pytest.raises(ConfigError, match=r"model\.a has shape \[5, 3\], here it is \["):
            load(store, 3, empty() | {"model.a": other})


def test_saving_copies_and_stores_behind_the_caller(tmp_path: Path) -> None:
    begin, entered = threading.Event(), threading.Event()

    class Waiting(LocalStore):
        def put(self, name: str, data: Any) -> None:
            entered.set()
            assert begin.wait(60)
            super().put(name, data)

    store, state = Waiting(tmp_path), some()
    saver = Saver(store)
    saver.save(3, state, SAID)
    assert entered.wait(60)
    for tensor in state.values():
        tensor.zero_()
    assert steps(store) == []
    begin.set()
    saver.close()
    found = empty()
    load(store, 3, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in some().items())


def test_a_failure_of_the_store_is_raised_at_the_next_save(tmp_path: Path) -> None:
    class Full(LocalStore):
        def put(self, name: str, data: Any) -> None:
            raise StoreError(f"{name}: no space left")

    saver = Saver(Full(tmp_path))
    saver.save(3, some(), SAID)
    with pytest.raises(StoreError, match="no space left"):
        saver.save(4, some(), SAID)
    saver.close()
    saver = Saver(Full(tmp_path))
    saver.save(3, some(), SAID)
    with pytest.raises(StoreError, match="no space left"):
        saver.close()
    assert steps(LocalStore(tmp_path)) == []


def test_a_run_whose_last_checkpoint_cannot_be_stored_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LocalStore.put

    def put(self: LocalStore, name: str, data: Any) -> None:
        if "step-00000008" in name:
            raise StoreError(f"{name}: no space left")
        plain(self, name, data)

    monkeypatch.setattr(LocalStore, "put", put)
    made = config(write_rows(tmp_path / "data", 40), tmp_path / "run", save_interval="4ba")
    with pytest.raises(StoreError, match="no space left"):
        train(made)
    assert steps_of(tmp_path / "run" / "checkpoints") == [4]


def test_an_attempt_that_was_killed_leaves_nothing_behind_the_next(store: LocalStore, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints" / "step-00000003"
    store.put("step-00000003/0badc0de-00000.bin", b"cut")
    small.save(store, 3, some(), SAID)
    small.save(store, 3, some() | {"model.a": torch.ones(5, 3)}, SAID)
    assert len(list(place.iterdir())) == 2
    found = empty()
    load(store, 3, found)
    assert torch.equal(found["model.a"], torch.ones(5, 3))


def test_old_checkpoints_and_attempts_go(store: LocalStore, tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        small.save(store, step, {"a": torch.zeros(2)}, SAID)
    store.put("step-00000003/cut-00000.bin", b"cut")
    store.put("step-00000009/cut-00000.bin", b"being written")
    store.put("notes/step-00000001/manifest.json", b"not ours")
    prune(store, -1)
    assert steps(store) == [2, 4, 6, 8]
    prune(store, 2)
    left = sorted(str(path.relative_to(tmp_path / "checkpoints")) for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["notes", "step-00000006", "step-00000008", "step-00000009"]


def test_a_deletion_that_is_cut_leaves_no_checkpoint(tmp_path: Path) -> None:
    class Cut(LocalStore):
        def delete_prefix(self, prefix: str) -> None:
            raise StoreError("cut")

    store = Cut(tmp_path)
    for step in (2, 4):
        small.save(store, step, {"a": torch.zeros(2)}, SAID)
    with pytest.raises(StoreError):
        prune(store, 1)
    assert steps(store) == [4], "step 2 has lost its pieces, or is about to"


def test_the_manifest_waits_for_every_ranks_pieces(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(store)
    late = threading.Timer(0.3, lambda: store.put("step-00000003/x-00001.bin", b"12345"))
    late.start()
    saver._until_stored("step-00000003", {"x-00001.bin": 5})
    late.join()
    monkeypatch.setattr(checkpoint, "PATIENCE", 0.1)
    for wanted in ({"x-00001.bin": 6}, {"x-00002.bin": 5}):
        with pytest.raises(ConfigError, match=r"x-0000.\.bin of another process never came"):
            saver._until_stored("step-00000003", wanted)
    saver.close()


class Unlisted(LocalStore):
    """Takes objects and lists none, as SeaweedFS does in a bucket whose name has two letters."""

    def list(self, prefix: str = "") -> list[Entry]:
        return []

    def tags(self) -> dict[str, str]:
        return {}


def test_a_store_that_lists_nothing_is_named_while_the_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "LISTING_SECONDS", 0.2)
    saver = Saver(Unlisted(tmp_path))
    with pytest.raises(StoreError, match=r"takes objects and does not list them: step-0000.*name another bucket"):
        small.save(saver.store, 3, some(), SAID)
    late = threading.Timer(0.5, lambda: saver.store.put("step-00000003/x-00001.bin", b"12345"))
    late.start()  # what is not there yet is waited for as ever
    with pytest.raises(StoreError, match=r"does not list them: step-00000003/x-00001\.bin"):
        saver._until_stored("step-00000003", {"x-00001.bin": 5})
    assert not late.is_alive()
    saver.close()


def test_a_damaged_checkpoint_ends_the_run_that_would_go_on_from_it(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", 40)
    made = config(data, tmp_path / "run", save_interval="4ba", autoresume=True)
    train(made)
    place = tmp_path / "run" / "checkpoints" / "step-00000008"
    path = next(place.glob("*.bin"))
    data_of = bytearray(path.read_bytes())
    data_of[len(data_of) // 3] ^= 1
    path.write_bytes(data_of)
    longer = config(data, tmp_path / "run", save_interval="4ba", autoresume=True, max_duration="12ba")
    with pytest.raises(ConfigError, match=rf"{path.name} is damaged: \S+ is not what was written"):
        train(longer)
    good = re.escape(str(tmp_path / "run" / "checkpoints" / "step-00000004"))
    with pytest.raises(ConfigError, match=rf"whole is {good}: autoresume=previous goes on from there"):
        train(longer)
    with pytest.raises(ConfigError, match=rf"whole is {good}: name it in load_path"):
        train(config(data, tmp_path / "other", load_path=str(place.parent), max_duration="12ba"))
    (place / MANIFEST).unlink()
    assert train(longer).steps == 12
    assert log_of(tmp_path / "run")[-1]["step"] == 12


@pytest.mark.parametrize("damaged", [(8,), (4, 8), (2, 4, 8)])
def test_autoresume_goes_on_from_the_last_checkpoint_that_is_whole(
    tmp_path: Path, damaged: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    data = write_rows(tmp_path / "data", 40)
    changes = {"save_interval": "2ba", "autoresume": "previous"}
    whole = config(data, tmp_path / "whole", max_duration="12ba", **changes)
    train(whole)
    made = config(data, tmp_path / "run", **changes)
    train(made)
    place = tmp_path / "run" / "checkpoints"
    for step in set(steps_of(place)) - {2, 4, 8}:
        shutil.rmtree(place / f"step-{step:08d}")
    for step in damaged:
        path = next((place / f"step-{step:08d}").glob("*.bin" if step == 8 else MANIFEST))
        path.write_bytes(path.read_bytes()[:-5])
    longer = config(data, tmp_path / "run", max_duration="12ba", save_num_checkpoints_to_keep=3, **changes)
    if len(damaged) == 3:
        with pytest.raises(ConfigError, match=r"of the 3 checkpoints in .* none is what was written"):
            train(longer)
        assert steps_of(place) == [2, 4, 8], "nothing is deleted by a refusal"
        return
    assert train(longer).steps == 12
    assert f"going on from step {4 if len(damaged) == 1 else 2}" in caplog.text
    assert steps_of(place) == [8, 10, 12]
    ends = [stored(tmp_path / name / "checkpoints", 12) for name in ("whole", "run")]
    assert digest(ends[0]) == digest(ends[1])
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")


@pytest.mark.slow
def test_through_an_object_store(tmp_path: Path, s3: str) -> None:
    data = write_rows(tmp_path / "data", 40)
    common: dict[str, Any] = {"save_interval": "3ba", "save_num_checkpoints_to_keep": 2}
    train(config(data, tmp_path / "whole", **common))
    train(config(data, tmp_path / "a", save_folder=f"{s3}/a", max_duration="6ba", **common))
    train(config(data, tmp_path / "b", load_path=f"{s3}/a", save_folder=f"{s3}/b", **common))
    made = config(data, tmp_path / "c", load_path=f"{s3}/b/step-00000008", save_folder=f"{s3}/b", **common)
    with pytest.raises(ConfigError, match="holds checkpoints up to step 8"):
        train(made)
    place = manifest.open_store(f"{s3}/b")
    assert steps(place) == [8]
    (tmp_path / "got" / "step-00000008").mkdir(parents=True)
    for entry in place.list("step-00000008"):
        (tmp_path / "got" / entry.name).write_bytes(place.get(entry.name))
    assert (tmp_path / "got" / "step-00000008" / "manifest.json").exists()
    assert digest(stored(tmp_path / "got")) == digest(stored(tmp_path / "whole" / "checkpoints"))


def kill(tmp_path: Path, kills: int, seed: int, **changes: Any) -> tuple[Path, list[dict[str, int]]]:
    data = write_rows(tmp_path / "data", 103)
    common: dict[str, Any] = {
        "max_duration": "20ba",
        "save_interval": "3ba",
        "deterministic_mode": True,
        "save_num_checkpoints_to_keep": 2,
        "autoresume": True,
        "eval_loader": {"dataset": {"local": str(data)}},
        "eval_interval": "5ba",
        **changes,
    }
    paths = {}
    for name in ("whole", "killed"):
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_text(json.dumps(mapping(data, tmp_path / name, **common)))

    done = run_forked(["-m", "tests.train.killed", paths["whole"], paths["killed"], str(kills), str(seed)])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[-1]["status"] == 0
    return tmp_path, found


def the_same(root: Path, steps: int) -> None:
    ends = [stored(root / name / "checkpoints") for name in ("whole", "killed")]
    assert digest(ends[0]) == digest(ends[1])
    assert steps_of(root / "killed" / "checkpoints") == [steps - steps % 3, steps]
    assert not list((root / "killed" / "checkpoints").rglob("*.part"))
    assert (root / "whole" / RECEIPTS).read_text() == (root / "killed" / RECEIPTS).read_text()
    assert verify(read(root / "killed")) is None
    order = read(root / "killed").order
    seen = np.concatenate([order.batch(step) for step in range(steps)])
    assert sorted(seen[:103]) == list(range(103)), "every sample once an epoch"
    assert log_of(root / "whole") == log_of(root / "killed")


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    root, found = kill(tmp_path, 8, seed=1)
    assert sum(each["status"] == -9 for each in found) >= 3
    the_same(root, 20)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3])
def test_at_any_moment(tmp_path: Path, seed: int) -> None:
    """Among them moments in which an object was half written, and a checkpoint had no manifest yet."""
    root, found = kill(tmp_path, 200, seed, max_duration="61ba", precision="amp_fp16")
    the_same(root, 61)
    assert sum(each["status"] == -9 for each in found) >= 12
    assert any(each["parts"] for each in found)
    assert any(each["attempts"] for each in found)


@pytest.mark.parametrize("most", [1, 7, 1 << 22])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "uint8"])
def test_a_fingerprint_is_the_sum_over_elements_and_pieces(
    dtype: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element's bits, as a whole number with a sign, plus 1, times its place doubled plus 1."""
    monkeypatch.setattr(state, "_ELEMENTS", most)
    whole = (torch.randn((6, 5), generator=torch.Generator().manual_seed(2)) * 90).to(getattr(torch, dtype))
    width = whole.element_size()
    raw = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    numbers = [int.from_bytes(raw[i : i + width], "little", signed=width > 1) for i in range(0, len(raw), width)]
    expected = sum((number + 1) * (2 * place + 1) for place, number in enumerate(numbers))

    def found(rows: slice, columns: slice) -> int:
        return state._fingerprint(whole[rows, columns], (rows.start, columns.start), (6, 5))

    for row, column in ((6, 5), (1, 5), (4, 3)):
        pieces = [
            found(slice(a, b), slice(c, d))
            for a, b in ((0, row), (row, 6))
            for c, d in ((0, column), (column, 5))
            if b > a and d > c
        ]
        assert (sum(pieces) - expected) % (1 << 64) == 0
    deep = whole.reshape(2, 3, 5)
    of_rows = [state._fingerprint(deep[i : i + 1], (i,), (2, 3, 5)) for i in range(2)]
    assert (sum(of_rows) - expected) % (1 << 64) == 0
    one = whole[:1, :1].reshape(())
    assert state._fingerprint(one, (), ()) == numbers[0] + 1


def test_manifests_that_earlier_runs_have_written_are_of_this_version() -> None:
    assert json.loads(manifest.encode(2, {}, {}))["version"] == 1
