"""Order receipts: kept through crashes and resumes, refused where they are another run's, and compared."""

import json
from pathlib import Path

import pytest

from roofline.common.errors import ConfigError
from roofline.train.data.order import Order, Stream
from roofline.train.data.receipts import RECEIPTS, START, ReceiptLog, advance, compare, read, verify
from tests.command_line import call_roofline

ORDER = Order((Stream((30, 41, 9), block=50),), 16, 17)


def run(folder: Path, order: Order = ORDER, steps: int = 12, begin: int = 0, receipt: str = START) -> str:
    log = ReceiptLog(folder, order, begin, receipt)
    for step in range(begin, steps):
        receipt = log.add(order.batch(step))
    log.close()
    return receipt


def said(*words: object) -> tuple[int, str]:
    result = call_roofline(["data", "verify-order", *map(str, words)])
    return result.exit_code, result.output


def test_a_resumed_run_has_the_receipts_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "a")
    at_five = read(tmp_path / "a").receipts[4]
    run(tmp_path / "b", steps=9)  # steps 5 to 8 came after the checkpoint: they are taken again
    assert run(tmp_path / "b", begin=5, receipt=at_five) == whole
    assert (tmp_path / "a" / RECEIPTS).read_text() == (tmp_path / "b" / RECEIPTS).read_text()
    assert compare(read(tmp_path / "a"), read(tmp_path / "b")).step is None
    code, text = said(tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "all 12 steps that both took (12 and 12)" in text


def test_a_crash_leaves_at_most_a_cut_line(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / RECEIPTS
    path.write_text(path.read_text()[:-20])
    assert len(read(tmp_path).receipts) == 11
    assert verify(read(tmp_path)) is None
    run(tmp_path, begin=11, receipt=read(tmp_path).receipts[-1])
    assert len(read(tmp_path).receipts) == 12


def test_resuming_on_other_receipts_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "a")
    receipt = read(tmp_path / "a").receipts[4]
    for begin, given in ((5, START), (4, receipt), (13, receipt)):
        with pytest.raises(ConfigError, match="do not lead to that of the checkpoint at step"):
            ReceiptLog(tmp_path / "a", ORDER, begin, given)
    with pytest.raises(ConfigError, match="do not lead to that of the checkpoint at step 4"):
        ReceiptLog(tmp_path / "empty", ORDER, 4, receipt)
    with pytest.raises(ConfigError, match="another order of samples"):
        ReceiptLog(tmp_path / "a", Order(ORDER.streams, 16, 18))
    assert len(read(tmp_path / "a").receipts) == 12, "nothing is lost by a refusal"


def test_a_run_that_moved_gets_the_receipts_it_left_behind(tmp_path: Path) -> None:
    run(tmp_path / "a")
    held = read(tmp_path / "a").receipts
    ReceiptLog(tmp_path / "b", ORDER, 3, held[2]).close()
    assert read(tmp_path / "b").receipts == held[:3]
    ReceiptLog(tmp_path / "b", ORDER, 9, held[8]).close()
    assert read(tmp_path / "b").receipts == held[:9]


def test_the_first_other_sample_is_named(tmp_path: Path) -> None:
    run(tmp_path / "a")
    other = Order((Stream((30, 41, 9), shuffle=False),), 16, 17)
    run(tmp_path / "b", other)
    found = compare(read(tmp_path / "a"), read(tmp_path / "b"))
    assert found.step == 0
    assert found.sample == (0, int(ORDER.batch(0)[0]), 0)
    code, text = said(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "differ from step 0 on" in text
    assert "place 0 of that batch is sample 0: stream 0, shard 0, number 0 in it" in text
    longer = Order(ORDER.streams, 17, 17)
    run(tmp_path / "c", longer)
    code, text = said(tmp_path / "a", tmp_path / "c")
    assert code == 1
    assert "place 16 of that batch is empty: its batch is shorter" in text


def test_a_run_that_computed_something_else_is_found(tmp_path: Path) -> None:
    log, receipt = ReceiptLog(tmp_path / "a", ORDER), START
    for step in range(8):
        ids = ORDER.batch(step)
        if step == 5:
            ids = ids[::-1]
        receipt = advance(receipt, ids)
        assert log.add(ids) == receipt
    log.close()
    assert verify(read(tmp_path / "a")) == 5
    code, text = said(tmp_path / "a", tmp_path / "a")
    assert code == 1
    assert "the receipt of step 5 is not that of its order" in text


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"order\.json is missing"):
        read(tmp_path)
    run(tmp_path)
    lines = (tmp_path / RECEIPTS).read_text().split("\n")
    for bad in ("", "{}", json.dumps({"step": 4, "receipt": "00" * 32}), json.dumps({"step": 3, "receipt": "zz"})):
        (tmp_path / RECEIPTS).write_text("\n".join([*lines[:3], bad, *lines[4:]]))
        with pytest.raises(ConfigError, match="line 4 is not the receipt of step 3"):
            read(tmp_path)
    (tmp_path / "order.json").write_text("{")
    code, text = said(tmp_path, tmp_path)
    assert code == 1
    assert "damaged" in text
