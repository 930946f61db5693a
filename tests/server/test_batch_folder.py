"""The folder of files and batches: what is in it beside them, and a disk that refuses for a while."""

import msgspec

from roofline.server.batches.files import Files, StoredFile
from roofline.server.limits import Limits


def test_files_of_somebody_else_stay_in_the_folder(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    identity = f"file-{'a' * 32}"
    foreign = ["settings.json", "table.data", "movie.mkv.part", f"{identity}.json.part", f"{'a' * 31}.part"]
    for name in foreign:
        (folder / name).write_text("precious")
    (folder / f"{identity}.data").write_text("without its facts")
    (folder / f"{'b' * 32}.part").write_text("half an upload")
    (folder / f"{identity}.json.123.part").write_text("half of its facts")
    Files(tmp_path, Limits()).close()
    assert sorted(path.name for path in folder.iterdir()) == sorted(foreign)
    assert {(folder / name).read_text() for name in foreign} == {"precious"}


def test_facts_that_name_another_file_are_not_offered(tmp_path):
    folder, identity = tmp_path / "files", f"file-{'a' * 32}"
    folder.mkdir()
    (folder / f"{identity}.data").write_text("data")
    facts = StoredFile("../../secret", "", "in.jsonl", "batch", 4, 1)
    (folder / f"{identity}.json").write_bytes(msgspec.json.encode(facts))
    files = Files(tmp_path, Limits())
    files.close()
    assert files.of("") == []
