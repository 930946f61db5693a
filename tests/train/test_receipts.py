"""Order receipts: kept through crashes and resumes, refused where they are another run's, and compared."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from roofline.common.errors import ConfigError
from roofline.train.data.order import Order, Stream
from roofline.train.data.receipts import RECEIPTS, START, ReceiptLog, advance, compare, read, verify
from roofline.train.data.row_digest import BYTES
from tests.command_line import call_roofline

ORDER = Order((Stream((30, 41, 9), block=50),), 16, 17)


def digest(step: int, data: str = "rows") -> bytes:
    """A stand-in for that of the rows of a step."""
    return hashlib.sha256(f"{data} {step}".encode()).digest()[:BYTES]


def run(
    folder: Path, order: Order = ORDER, steps: int = 12, begin: int = 0, receipt: str = START, data: str = "rows"
) -> str:
    """Receipts as a run writes them; data="": as a run of an older version, which recorded no rows."""
    log = ReceiptLog(folder, order, begin, receipt, b"".join(digest(step) for step in range(begin)) if data else b"")
    for step in range(begin, steps):
        receipt = log.add(order.batch(step), digest(step, data) if data else b"")
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


def test_steps_are_counted_as_in_the_log_and_older_files_are_read(tmp_path: Path) -> None:
    """Older versions counted from 0; a run that goes on from them counts all of its steps from 1."""
    receipt = run(tmp_path / "a")
    path = tmp_path / "a" / RECEIPTS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    before = read(tmp_path / "a")
    path.write_text("".join(json.dumps(line | {"step": line["step"] - 1}) + "\n" for line in lines))
    assert read(tmp_path / "a") == before
    assert run(tmp_path / "a", steps=14, begin=12, receipt=receipt) != receipt
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 15))


def test_resuming_on_other_receipts_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "a")
    receipt = read(tmp_path / "a").receipts[4]
    for begin, given in ((5, START), (4, receipt), (13, receipt)):
        with pytest.raises(ConfigError, match="do not lead to that of the checkpoint at step"):
            ReceiptLog(tmp_path / "a", ORDER, begin, given)
    digests = b"".join(digest(step, "other") for step in range(5))
    with pytest.raises(ConfigError, match="do not lead to that of the checkpoint at step 5"):
        ReceiptLog(tmp_path / "empty", ORDER, 5, receipt, digests)
    with pytest.raises(ConfigError, match="do not lead to that of the checkpoint at step 4"):
        ReceiptLog(tmp_path / "empty", ORDER, 4, receipt)
    with pytest.raises(ConfigError, match="another order of samples"):
        ReceiptLog(tmp_path / "a", Order(ORDER.streams, 16, 18))
    assert len(read(tmp_path / "a").receipts) == 12, "nothing is lost by a refusal"


def test_a_run_that_moved_gets_the_receipts_it_left_behind(tmp_path: Path) -> None:
    run(tmp_path / "a")
    held = read(tmp_path / "a").receipts
    for step in (3, 9):
        ReceiptLog(tmp_path / "b", ORDER, step, held[step - 1], b"".join(map(digest, range(step)))).close()
        assert read(tmp_path / "b").receipts == held[:step]
        assert verify(read(tmp_path / "b")) is None


def test_other_rows_under_the_same_numbers_are_found(tmp_path: Path) -> None:
    """Two data sets of equal shards had been called the same samples in the same order."""
    run(tmp_path / "a")
    log = ReceiptLog(tmp_path / "b", ORDER)
    for step in range(12):
        log.add(ORDER.batch(step), digest(step, "rows" if step < 7 else "other"))
    log.close()
    found = compare(read(tmp_path / "a"), read(tmp_path / "b"))
    assert (found.step, found.sample, found.content) == (8, None, True)
    code, text = said(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "differ from step 8 on" in text
    assert "the sample numbers agree, but not what their rows held" in text
    indexed = [replace(ORDER, streams=(replace(ORDER.streams[0], identity=name),)) for name in ("x", "y")]
    run(tmp_path / "x", indexed[0])
    run(tmp_path / "y", indexed[1], data="other")
    code, text = said(tmp_path / "x", tmp_path / "y")
    assert code == 1
    assert "the index of data set 0 is another one" in text
    with pytest.raises(ConfigError, match="the index of data set 0 is another one"):
        ReceiptLog(tmp_path / "x", indexed[1])


def test_runs_that_recorded_no_rows_are_read_and_called_unproven(tmp_path: Path) -> None:
    older = run(tmp_path / "older", data="")
    assert older == "5fa8e035905ac6bf997e44dc0aa48ec28184d0447441df2fc6a69a41f17e6ff8", "as older versions wrote them"
    run(tmp_path / "newer")
    assert verify(read(tmp_path / "older")) is None
    for a, b in (("older", "newer"), ("newer", "older"), ("older", "older")):
        found = compare(read(tmp_path / a), read(tmp_path / b))
        assert (found.steps, found.step, found.unproven) == (12, None, 12)
        code, text = said(tmp_path / a, tmp_path / b)
        assert code == 1
        assert "not proven: the sample numbers agree in all 12 steps" in text
    log = ReceiptLog(tmp_path / "older", ORDER, 12, older)  # goes on in a version that records them
    for step in range(12, 15):
        log.add(ORDER.batch(step), digest(step))
    log.close()
    run(tmp_path / "newer", steps=15)
    assert verify(read(tmp_path / "older")) is None
    found = compare(read(tmp_path / "older"), read(tmp_path / "newer"))
    assert (found.steps, found.step, found.unproven) == (15, None, 12)
    run(tmp_path / "newest", steps=15, data="other")
    assert compare(read(tmp_path / "older"), read(tmp_path / "newest")).step == 13
    run(tmp_path / "seed", Order(ORDER.streams, 16, 18))
    assert compare(read(tmp_path / "older"), read(tmp_path / "seed")).sample is not None


def test_an_empty_or_cut_file_proves_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tmp_path / name)
        (tmp_path / name / "log.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1}}\n' for n in range(1, 13)))
    assert said(tmp_path / "a", tmp_path / "b")[0] == 0
    path = tmp_path / "b" / RECEIPTS
    lines = path.read_text().splitlines(keepends=True)
    for text, message in (("", "holds no receipt"), ("".join(lines[:5]), "it ends at step 5, log.jsonl at step 12")):
        path.write_text(text)
        code, output = said(tmp_path / "a", tmp_path / "b")
        assert code == 1
        assert message in " ".join(output.split())
    ReceiptLog(tmp_path / "b", ORDER, 12, json.loads(lines[-1])["receipt"], b"".join(map(digest, range(12)))).close()
    assert path.read_text() == "".join(lines), "going on from a checkpoint completes it"


def test_the_first_other_sample_is_named(tmp_path: Path) -> None:
    run(tmp_path / "a")
    other = Order((Stream((30, 41, 9), shuffle=False),), 16, 17)
    run(tmp_path / "b", other)
    found = compare(read(tmp_path / "a"), read(tmp_path / "b"))
    assert found.step == 1
    assert found.sample == (0, int(ORDER.batch(0)[0]), 0)
    code, text = said(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "differ from step 1 on" in text
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
        receipt = advance(receipt, ids, digest(step))
        assert log.add(ids, digest(step)) == receipt
    log.close()
    assert verify(read(tmp_path / "a")) == 6
    code, text = said(tmp_path / "a", tmp_path / "a")
    assert code == 1
    assert "the receipt of step 6 is not that of its order" in text


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"order\.json is missing"):
        read(tmp_path)
    run(tmp_path)
    lines = (tmp_path / RECEIPTS).read_text().split("\n")
    entry = {"step": 4, "receipt": "00" * 32}
    others = ({"step": 3}, {"receipt": "zz"}, {"rows": "00"}, {"rows": 7})
    for bad in ("", "{}", "7", *(json.dumps(entry | other) for other in others)):
        (tmp_path / RECEIPTS).write_text("\n".join([*lines[:3], bad, *lines[4:]]))
        with pytest.raises(ConfigError, match="line 4 is not the receipt of step 4"):
            read(tmp_path)
    (tmp_path / "order.json").write_text("{")
    code, text = said(tmp_path, tmp_path)
    assert code == 1
    assert "damaged" in text


@pytest.mark.parametrize("step", [1, 5, 12])
def test_a_receipt_that_neither_numbers_nor_rows_explain_is_named(tmp_path: Path, step: int) -> None:
    run(tmp_path)
    plain = read(tmp_path)
    other = [*plain.receipts[: step - 1], *("0" * 64 for _ in plain.receipts[step - 1 :])]
    compared = compare(plain, replace(plain, receipts=other))
    assert (compared.steps, compared.step, compared.sample, compared.content) == (12, step, None, False)


def test_receipts_that_differ_because_one_binds_no_rows_prove_nothing_else(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", data="")
    compared = compare(read(tmp_path / "a"), read(tmp_path / "b"))
    assert (compared.step, compared.unproven) == (None, 12)
