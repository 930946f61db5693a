"""Rows as they reach the step: the same sequence for every world, number of threads and step resumed from."""

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import ConfigError
from roofline.train.config.data_sets import DatasetSection, LoaderSection
from roofline.train.data.loader import Loader, Share, Source, in_turn, read_batch
from roofline.train.data.mds import Shards, ShardWriter
from roofline.train.data.order import Order, share
from roofline.train.data.row_arrays import RowArrays
from roofline.train.data.row_digest import row_digest, row_sums
from roofline.train.data.synthetic import Synthetic
from roofline.train.parallel.elastic import rounds

WORLDS, WORKERS, RESUMED = (1, 2, 3, 4, 6, 8), (0, 1, 3), (0, 1, 8, 17)
LENGTH, BATCH = 8, 12
STEPS = 19  # of both data sets more than two epochs


def numbered(folder: Path, rows: int, first: int = 0, kind: str = "uint16") -> Path:
    """Rows that say their own number, in shards of seven."""
    with ShardWriter(folder, {"tokens": f"ndarray:{kind}:{LENGTH}"}, size_limit=400) as writer:
        for number in range(first, first + rows):
            writer.write({"tokens": np.full(LENGTH, number, kind)})
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of their samples: one that the batch divides, and one that it does not."""
    root = tmp_path_factory.mktemp("numbered")
    return {rows: numbered(root / str(rows), rows) for rows in (96, 103)}


def section(folder: Path, workers: int = 1, **options: Any) -> LoaderSection:
    return LoaderSection(
        dataset=DatasetSection(**({"local": str(folder), "shuffle": True, "shuffle_block_size": 20} | options)),
        num_workers=workers,
    )


def source_of(folder: Path, documents: bool = False, **options: Any) -> Source:
    return Source(section(folder, **options).dataset, LENGTH, documents)


@pytest.mark.parametrize("rows", [pytest.param(96, marks=pytest.mark.slow), 103])
def test_the_sequence_is_the_same_for_worlds_workers_and_resume_points(data: dict[int, Path], rows: int) -> None:
    source = source_of(data[rows])
    order = source.order(BATCH, seed=17)
    whole = [source.rows(order.batch(step))[0] for step in range(STEPS)]
    seen = np.concatenate(whole)[:, 0]
    for epoch in range(2):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows)), "each sample once an epoch"
    for world, workers, resumed in itertools.product(WORLDS, WORKERS, RESUMED):
        own = section(data[rows], workers)
        loaders = [Loader(source, order, own, [(rank, world)], resumed) for rank in range(world)]
        for step in range(resumed, STEPS):
            found = [next(loader) for loader in loaders]
            tokens = np.concatenate([part[0] for each in found for part in each.parts])
            assert np.array_equal(tokens, whole[step]), (world, workers, resumed, step)
            assert all(each.step == step and np.array_equal(each.ids, order.batch(step)) for each in found)
        for loader in loaders:
            loader.close()
    source.close()


def test_virtual_shards_are_the_same_parts_for_every_world(data: dict[int, Path]) -> None:
    source = source_of(data[103])
    order = source.order(BATCH, seed=17)
    for world in (1, 2, 4, 8):
        loaders = [Loader(source, order, section(data[103]), rounds(8, rank, world)) for rank in range(world)]
        for step in range(4):
            found = [next(loader).parts for loader in loaders]
            parts = [found[rank][r][0] for r in range(8 // world) for rank in range(world)]
            for shard, tokens in enumerate(parts):
                assert np.array_equal(tokens, source.rows(share(order.batch(step), shard, 8))[0])
        for loader in loaders:
            loader.close()
    source.close()


@pytest.mark.parametrize(("virtual", "world"), [(4, 3), (6, 2), (2, 4), (3, 1)])
def test_worlds_that_have_no_tree_are_refused(virtual: int, world: int) -> None:
    with pytest.raises(ConfigError, match=rf"elastic\.virtual_shards={virtual} on {world} processes"):
        rounds(virtual, 0, world)


def test_the_digest_of_a_batch_is_the_same_for_every_world_and_of_these_rows_alone(
    data: dict[int, Path], tmp_path: Path
) -> None:
    source = source_of(data[103])
    order = source.order(BATCH, seed=17)

    def digest(source: Source, order: Order, shares: list[list[Share]], step: int = 3) -> bytes:
        return row_digest(sum(read_batch(source, order, each, step).sums for each in shares))

    alone = digest(source, order, [[(0, 1)]])
    for world in (2, 3, 5, 16):
        assert digest(source, order, [[(rank, world)] for rank in range(world)]) == alone
    for world in (1, 2, 4):
        assert digest(source, order, [rounds(8, rank, world) for rank in range(world)]) == alone
    assert digest(source, order, [[(0, 1)]], 4) != alone
    other = source_of(numbered(tmp_path / "other", 103, first=1))
    assert other.order(BATCH, seed=17) == order
    assert other.order(BATCH, seed=17).difference(order) is None, "its index has no hashes and tells nothing"
    assert digest(other, order, [[(0, 1)]]) != alone
    tokens, apart = np.arange(16).reshape(2, 8), np.zeros((2, 8), np.int64)
    sums = [
        row_sums(RowArrays(*rows), places).tolist()
        for *rows, places in (
            (tokens, (0, 1)),
            (tokens, (1, 0)),
            (tokens[::-1], (0, 1)),
            (tokens, apart, (0, 1)),
            (tokens, apart + np.arange(8) // 4, (0, 1)),
            (tokens, apart, apart == 0, (0, 1)),
            (tokens, apart, apart != 0, (0, 1)),
        )
    ]
    assert sums[1] == sums[2], "both are row 1 in place 0 and row 0 in place 1"
    assert len({tuple(each) for each in sums}) == 6, "the places of rows, the bounds of documents and the targets count"


def test_the_identity_of_a_data_set_is_that_of_its_index_wherever_it_lies(tmp_path: Path) -> None:
    found = {}
    hashed = ("sha256",)
    for name, first, hashes in (("a", 0, hashed), ("copy", 0, hashed), ("other", 1, hashed), ("plain", 0, ())):
        columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
        with ShardWriter(tmp_path / name, columns, size_limit=400, hashes=hashes) as writer:
            for number in range(first, first + 20):
                writer.write({"tokens": np.full(LENGTH, number, np.uint16)})
        found[name] = Shards(tmp_path / name)
    assert len({shards.counts for shards in found.values()}) == 1
    assert found["a"].identity == found["copy"].identity
    assert len({shards.identity for shards in found.values()}) == 3


def test_streams_are_mixed_by_weight_and_numbered_through(tmp_path: Path) -> None:
    numbered(tmp_path / "a" / "train", 40)
    numbered(tmp_path / "b", 30, first=40, kind="int64")
    streams = {
        "a": {"local": str(tmp_path / "a"), "split": "train", "proportion": 0.75},
        "b": {"local": str(tmp_path / "b"), "proportion": "0.25"},
    }
    source = Source(DatasetSection(streams=streams, shuffle=True), LENGTH, False)
    assert len(source) == 70
    order = source.order(8, seed=3)
    for step in range(10):
        tokens = source.rows(order.batch(step))[0]
        assert tokens.dtype == np.int64
        assert np.array_equal(tokens[:, 0], order.batch(step)), "every sample of either stream is its number's"
        assert (tokens[:, 0] < 40).sum() == 6
    source.close()


def mixed(tmp_path: Path, *streams: dict[str, Any], **options: Any) -> Source:
    """A mixture of data sets with 14, 28, ... rows."""
    sections = {}
    for index, stream in enumerate(streams):
        folder = tmp_path / str(index)
        sections[str(index)] = {
            "local": str(folder if folder.exists() else numbered(folder, 14 * (index + 1))),
            **stream,
        }
    return Source(DatasetSection(streams=sections, shuffle=True, **options), LENGTH, False)


@pytest.mark.parametrize(
    ("streams", "epoch"),
    [
        (({}, {}), [1, 1]),
        (({"repeat": 3}, {}), [3, 1]),
        (({"repeat": 0.5}, {"repeat": "1.5"}), [0.5, 1.5]),
        (({"choose": 7}, {"choose": 7}), [0.5, 0.25]),
    ],
)
def test_streams_give_an_epoch_as_many_samples_as_they_are_to(
    tmp_path: Path, streams: tuple[dict[str, Any], ...], epoch: list[float]
) -> None:
    source = mixed(tmp_path, *streams)
    assert source.epoch == 14 * epoch[0] + 28 * epoch[1]
    order = source.order(source.epoch, seed=3)
    for step in range(4):
        ids = order.batch(step)
        assert [(ids < 14).sum(), (ids >= 14).sum()] == [14 * epoch[0], 28 * epoch[1]]
    assert order.epochs(4) == [4 * each for each in epoch]
    source.close()


def test_a_data_set_alone_is_ordered_as_before_whatever_an_epoch_counts(data: dict[int, Path]) -> None:
    plain = source_of(data[96]).order(BATCH, 1)
    for options, epoch in (({"repeat": 2}, 192), ({"choose": 10}, 10), ({"epoch_size": "2k"}, 2000)):
        source = source_of(data[96], **options)
        assert source.epoch == epoch
        assert source.order(BATCH, 1).record() == plain.record()


def test_kinds_of_shuffling(data: dict[int, Path]) -> None:
    """Shards of ten rows: of each in its place, of groups of them, of all."""
    orders = {
        kind: source_of(data[96], shuffle_algo=kind, shuffle_block_size=None).order(96, 1)
        for kind in ("py1b", "py1s", "naive")
    }
    counts = orders["py1s"].streams[0].shards
    shards = np.repeat(np.arange(len(counts)), counts)
    for kind, order in orders.items():
        ids = order.batch(0)
        assert sorted(ids) == list(range(96))
        changes = int((np.diff(shards[ids]) != 0).sum())
        assert (changes == len(counts) - 1) == (kind == "py1s"), "a shard's rows lie together"
        assert (np.diff(ids) != 1).any()
    assert orders["naive"].streams[0].block == 96
    assert orders["py1s"].streams[0].block == 1
    assert source_of(data[96], shuffle_algo="py1b").order(96, 1) == source_of(data[96]).order(96, 1)


def test_the_shuffle_seed_goes_before_the_runs_seed(data: dict[int, Path]) -> None:
    given = source_of(data[96], shuffle_seed=4)
    assert given.order(BATCH, seed=1) == given.order(BATCH, seed=2)
    plain = source_of(data[96])
    assert plain.order(BATCH, seed=1) != plain.order(BATCH, seed=2)
    assert np.array_equal(plain.order(BATCH, 4).batch(3), given.order(BATCH, 1).batch(3))
    unshuffled = source_of(data[96], shuffle=False)
    assert unshuffled.order(BATCH, seed=1).batch(1).tolist() == list(range(12, 24))


def test_older_data_sets_hold_bytes(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "bytes", {"tokens": "bytes"}) as writer:
        for number in range(5):
            writer.write({"tokens": np.arange(number, number + LENGTH, dtype="<i8").tobytes()})
    source = source_of(tmp_path / "bytes")
    assert source.rows([3])[0].tolist() == [list(range(3, 3 + LENGTH))]


def test_documents_come_from_the_column_or_from_the_end_token(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "said", {"tokens": "ndarray:uint16", "documents": "ndarray:uint32"}) as writer:
        for lengths in ((3, 5), (8,), (1, 1, 6)):
            writer.write({"tokens": np.arange(8, dtype=np.uint16), "documents": np.array(lengths, np.uint32)})
    tokens, documents, _ = source_of(tmp_path / "said", documents=True).rows([2, 0, 1])
    assert documents is not None
    assert documents.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2], [0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]
    assert tokens.shape == documents.shape
    with ShardWriter(tmp_path / "plain", {"tokens": "ndarray:uint16"}) as writer:
        writer.write({"tokens": np.array([5, 9, 5, 5, 9, 9, 5, 5], np.uint16)})
    _, documents, _ = source_of(tmp_path / "plain", documents=True, eos_token_id=9).rows([0])
    assert documents is not None
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2, 3, 3]], "an end token belongs to what it ends"
    with pytest.raises(ConfigError, match="do not say where documents end"):
        source_of(tmp_path / "plain", documents=True).rows([0])
    assert source_of(tmp_path / "plain").rows([0])[1] is None


def test_rows_that_do_not_fit_are_refused_by_folder(tmp_path: Path, data: dict[int, Path]) -> None:
    with pytest.raises(ConfigError, match=r"96: a row has 8 tokens, max_seq_len is 9"):
        Source(section(data[96]).dataset, 9, False).rows([0])
    with pytest.raises(ConfigError, match=r"max_seq_len=8, but the data set's is 7"):
        source_of(data[96], max_seq_len=7)
    with ShardWriter(tmp_path / "other", {"text": "str"}) as writer:
        writer.write({"text": "words"})
    with pytest.raises(ConfigError, match=r"other: a row has columns text, max_seq_len is 8"):
        source_of(tmp_path / "other").rows([0])
    with pytest.raises(ConfigError, match=r"local is missing, the folder of shards, or remote"):
        Source(DatasetSection(), LENGTH, False)


def test_ids_beyond_the_models_vocabulary_are_refused_by_folder(data: dict[int, Path]) -> None:
    """Not left to a kernel's assertion, or to whatever lies behind the embedding."""
    source = source_of(data[96])
    source.vocab_limit = 90
    assert source.rows([3, 89])[0][:, 0].tolist() == [3, 89]
    with pytest.raises(ConfigError, match=r"96: a row has the id 93, the model's vocabulary is 90"):
        source.rows([3, 93, 4])
    assert source.rows([])[0].shape == (0, LENGTH)


def test_a_fault_in_what_is_read_ahead_comes_at_its_step(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "cut", 30)
    path = sorted(folder.glob("*.mds"))[-1]
    path.write_bytes(path.read_bytes()[:-1])
    source = source_of(folder, shuffle=False)
    loader = Loader(source, source.order(10, 0), section(folder, 3), [(0, 1)])
    assert [next(loader).ids[0] for _ in range(2)] == [0, 10]
    with pytest.raises(ConfigError, match="cut or another file"):
        next(loader)
    loader.close()
    source.close()


def test_nothing_is_left_running(data: dict[int, Path]) -> None:
    before = threading.active_count()
    source = source_of(data[103])
    loader = Loader(source, source.order(BATCH, 0), section(data[103], 3), [(0, 1)])
    next(loader)
    assert threading.active_count() > before
    loader.close()
    source.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 5, 16])
def test_evaluation_sees_every_sample_once(data: dict[int, Path], world: int, batch: int) -> None:
    source = source_of(data[103])
    ranks = [list(in_turn(source, batch, rank, world, -1)) for rank in range(world)]
    assert {len(rank) for rank in ranks} == {-(-103 // (batch * world))}, "as many batches for every rank"
    assert max(len(tokens) for rank in ranks for tokens, _ in rank) <= batch
    for index in range(len(ranks[0])):
        found = np.concatenate([rank[index][1].tokens[:, 0] for rank in ranks])
        first = index * batch * world
        assert found.tolist() == list(range(first, min(first + batch * world, 103)))
    some = [list(in_turn(source, batch, rank, world, 3)) for rank in range(world)]
    assert sum(len(rows) for rank in some for rows, *_ in rank) == 3 * batch, "the same rows for any number of ranks"
    assert len({len(rank) for rank in some}) == 1
    source.close()


@pytest.mark.slow
def test_rows_of_an_object_store_are_those_of_the_folder(data: dict[int, Path], s3: str, tmp_path: Path) -> None:
    from roofline.train.storage.open import open_store

    folder = data[max(data)]
    store = open_store(f"{s3}/train")
    for file in folder.iterdir():
        store.put(file.name, file.read_bytes())
    far = {"remote": s3, "split": "train", "local": str(tmp_path / "cache"), "cache_limit": "1mb", "shuffle": True}
    near = {"local": str(folder), "shuffle": True}
    found = []
    for dataset in (near, far):
        settings = LoaderSection.model_validate({"dataset": {**dataset, "predownload": 30}, "num_workers": 2})
        source = Source(settings.dataset, LENGTH, False)
        loader = Loader(source, source.order(7, 3), settings, [(0, 2), (1, 2)])
        found.append([next(loader) for _ in range(12)])
        loader.close()
        source.close()
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a.ids, b.ids)
        for (x, *_), (y, *_) in zip(a.parts, b.parts, strict=True):
            assert np.array_equal(x, y)


def test_synthetic_rows_are_functions_of_their_number_alone() -> None:
    rows = Synthetic(600, documents=True)
    rows.vocab_limit = 50
    assert (len(rows), rows.epoch, rows.remote, rows.vocab) == (1 << 20, 1 << 20, False, None)
    tokens, documents, _ = rows.rows([7, 3])
    assert np.array_equal(tokens, [np.random.default_rng(n).integers(0, 50, 600) for n in (7, 3)])
    assert documents is not None
    assert documents.tolist() == [[0] * 256 + [1] * 256 + [2] * 88] * 2
    order = rows.order(4, 1)
    assert [order.batch(step).tolist() for step in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert order.batch((1 << 18) - 1).tolist()[-1] == (1 << 20) - 1
    assert order.batch(1 << 18).tolist() == [0, 1, 2, 3]
    alone = Synthetic(3, documents=False)
    alone.vocab_limit = 2
    assert alone.rows([1])[1] is None


class Remote(Synthetic):
    """Synthetic rows that would have to be fetched; notes what is asked for ahead."""

    remote = True

    def __init__(self) -> None:
        super().__init__(4, False)
        self.vocab_limit = 9
        self.asked: list[list[int]] = []

    def prefetch(self, numbers: np.ndarray) -> None:
        self.asked.append(numbers.tolist())


@pytest.mark.parametrize(
    ("predownload", "shares", "fetched"),
    [
        (None, [(1, 3)], 8),
        (30, [(1, 3)], 8),  # 4 rows a step: 30 are within 8 steps
        (32, [(1, 3)], 8),
        (33, [(1, 3)], 9),
        (33, [(0, 3), (2, 3)], 5),
        (30, [(0, 12)], 30),
        (5, [(0, 24)], 5),  # no row at all
        (256, [(1, 3)], 64),
        (9999, [(1, 3)], 64),
    ],
)
def test_as_many_steps_are_fetched_ahead_as_hold_the_samples(
    predownload: int | None, shares: list[tuple[int, int]], fetched: int
) -> None:
    source = Remote()
    loader = Loader(source, source.order(12, 1), section(Path(), 0, predownload=predownload), shares, 4)
    assert next(loader).step == 4
    loader.close()
    assert source.asked == [[i for step in range(5, 5 + fetched) for part in shares for i in share(
        np.arange(12 * step, 12 * step + 12), *part).tolist()]]  # fmt: skip


@pytest.mark.parametrize(("workers", "factor", "ahead"), [(0, 5, 0), (1, 1, 1), (3, 5, 15)])
def test_each_worker_reads_so_many_steps_ahead(workers: int, factor: int, ahead: int) -> None:
    source = Synthetic(4, False)
    source.vocab_limit = 9
    options = section(Path(), workers).model_copy(update={"prefetch_factor": factor})
    loader = Loader(source, source.order(2, 1), options, [(0, 1)], 7)
    assert [next(loader).step for _ in range(2)] == [7, 8]
    assert len(loader._waiting) == ahead
    assert loader._pool._max_workers == max(1, workers)
    loader.close()
