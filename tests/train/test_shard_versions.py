"""Shards that are replaced while a run reads them, under an index without hashes: refused, wherever they lie."""

import logging
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roofline.common.errors import ConfigError
from roofline.train.data.loader import Source
from roofline.train.data.mds import Shards
from roofline.train.storage.open import open_store
from roofline.train.storage.store import ChangedError
from tests.train.rows import ROWS, SHARDS, right
from tests.train.seaweed import Proxy
from tests.train.test_remote import upload, write

REFUSED = r"shard\.0000{}\.mds(\.zstd)? was replaced after its index\.json was read.*begin a new run with the new"


def replace(folder: Path, url: str | Path, numbers: Iterable[int]) -> None:
    """Put some of a folder's shards under their names elsewhere, in place of what is there, without its index."""
    target = open_store(url)
    for number in numbers:
        for path in folder.glob(f"shard.0000{number}.mds*"):
            target.put(path.name, path.read_bytes())


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("place", ["folder", "s3"])
def test_replaced_shards_are_refused(
    place: str, compression: str | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = tmp_path / "data" if place == "folder" else request.getfixturevalue("s3")
    for seed in (0, 1):
        write(tmp_path / str(seed), compression, seed=seed)
    upload(tmp_path / "0", url)
    size = write(tmp_path / "raw")
    with closing(Shards(url, tmp_path / "cache", 3 * size)) as shards:
        right(shards, 0)
        replace(tmp_path / "1", url, range(SHARDS))
        for number in (3, 4):
            with pytest.raises(ConfigError, match=REFUSED.format(number)):
                shards[number * ROWS]
        replace(tmp_path / "0", url, range(3, 4))
        if place == "s3":  # the very same bytes have the same entity tag
            right(shards, 3 * ROWS)
        else:
            with pytest.raises(ConfigError, match=REFUSED.format(3)):
                shards[3 * ROWS]
    with closing(Shards(url, tmp_path / "cache", 3 * size)) as later:  # no shard of earlier ones from the cache
        right(later, 0, seed=1)
        right(later, 3 * ROWS, seed=0)
        assert later.versions.digest != shards.versions.digest
        assert later.identity == shards.identity


@pytest.mark.parametrize("how", ["written over", "renamed over"])
def test_a_file_that_is_mapped_already_is_refused(tmp_path: Path, how: str) -> None:
    for seed in (0, 1):
        write(tmp_path / str(seed), seed=seed)
    with closing(Shards(tmp_path / "0")) as shards:
        right(shards, 0)
        if how == "renamed over":
            replace(tmp_path / "1", tmp_path / "0", range(1))
        else:
            (tmp_path / "0" / "shard.00000.mds").write_bytes((tmp_path / "1" / "shard.00000.mds").read_bytes())
        with pytest.raises(ConfigError, match=REFUSED.format(0)):
            shards[1]
        right(shards, ROWS)


def test_hashes_tell_equal_content_from_other(tmp_path: Path) -> None:
    for seed in (0, 1):
        write(tmp_path / str(seed), None, ("xxh64",), seed=seed)
    path = tmp_path / "0" / "shard.00000.mds"
    with closing(Shards(tmp_path / "0")) as shards:
        assert shards.versions.notice() is None
        right(shards, 0)
        path.write_bytes(path.read_bytes())
        right(shards, 1)
        path.write_bytes((tmp_path / "1" / path.name).read_bytes())
        with pytest.raises(ConfigError, match=r"shard\.00000\.mds is damaged: its xxh64"):
            shards[2]


def test_without_a_listing_the_first_use_counts(proxy: Proxy, s3: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        size = write(tmp_path / str(seed), seed=seed)
    upload(tmp_path / "0", s3)
    proxy.refuse(1, status=403, part="list-type=2")
    with closing(Shards(s3, tmp_path / "cache", 2 * size)) as shards:
        notice = shards.versions.notice()
        assert notice is not None
        assert "the version of its first use here, or what the cache had" in notice
        assert "these keys do not permit it" in notice
        right(shards, 0)
        replace(tmp_path / "1", s3, range(2))
        right(shards, ROWS, seed=1)  # it was never used before
        right(shards, 2 * ROWS)
        right(shards, 3 * ROWS)  # the cache has room for two
        with pytest.raises(ConfigError, match=REFUSED.format(0)):
            shards[0]


def test_a_file_written_over_while_it_is_read_is_found_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("a", bytes(3_000_000))
    pieces = store.chunks("a", store.tag("a"))
    assert next(pieces) == bytes(1 << 20)
    (tmp_path / "a").write_bytes(b"1" * 3_000_000)
    with pytest.raises(ChangedError):
        next(pieces)


def run_of(source: Source) -> Any:
    """As much of a run as what is tested here looks at."""
    world = SimpleNamespace(rank=0, first=lambda function: function())
    return cast(Any, SimpleNamespace(source=source, held_out={"eval": source}, world=world))


def test_a_run_that_goes_on_refuses_shards_that_were_replaced(s3: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="training is torch")
    from roofline.train.checkpoint.state import _check_versions, _versions
    from roofline.train.config.data_sets import DatasetSection

    for seed in (0, 1):
        write(tmp_path / str(seed), seed=seed)
    upload(tmp_path / "0", s3)
    section = DatasetSection(remote=s3, local=str(tmp_path / "cache"))
    with closing(Source(section, 250, documents=False)) as source:
        saved = {"shards": _versions(run_of(source))}
    assert list(saved["shards"]) == [s3]
    with closing(Source(section, 250, documents=False)) as source:
        _check_versions(run_of(source), saved)
        _check_versions(run_of(source), {})  # of an older version
    replace(tmp_path / "1", s3, range(5, 6))
    refused = f"shards of {s3} were replaced since the checkpoint's run began.*Put back"
    with closing(Source(section, 250, documents=False)) as source, pytest.raises(ConfigError, match=refused):
        _check_versions(run_of(source), saved)
    # Files of folders have other times on other machines.
    with closing(Source(DatasetSection(local=str(tmp_path / "0")), 250, documents=False)) as source:
        assert _versions(run_of(source)) == {}


def test_a_run_says_once_that_an_index_has_no_hashes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torch", reason="training is torch")
    from roofline.train.config.data_sets import DatasetSection
    from roofline.train.run.parts import warn_of_missing_hashes

    for name, compression, hashes in (("without", None, ()), ("with", None, ("sha1",)), ("packed", "zstd", ())):
        write(tmp_path / name, compression, hashes)
        section = DatasetSection(local=str(tmp_path / name))
        with closing(Source(section, 250, documents=False)) as source, caplog.at_level(logging.WARNING):
            warn_of_missing_hashes(run_of(source))
    record, packed = caplog.records
    assert (
        f"the index of {tmp_path / 'without'} has no hashes: damage within its shards is not noticed" in record.message
    )
    packed_text = f"the index of {tmp_path / 'packed'} has no hashes: damage within its shards is noticed only where"
    assert f"{packed_text} unpacking fails, and of each shard" in packed.message
    assert "the version that was there when its index was read counts as the right one" in record.message
