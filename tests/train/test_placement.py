"""Which process of its run this one is: what launchers say is read, and what cannot be is refused by name."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from roofline.common.errors import ConfigError
from roofline.train.parallel.placement import ProcessPlacement
from roofline.train.run.loop import train
from tests.train import small

ONE = "as it is where WORLD_SIZE is not set: unset RANK, WORLD_SIZE,"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that no launcher has written to."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (0, 1, 0, None)),
        ({"RANK": "0", "LOCAL_RANK": "0"}, (0, 1, 0, None)),
        ({"WORLD_SIZE": "", "RANK": ""}, (0, 1, 0, None)),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2)),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3"}, (3, 4, 3, None)),
    ],
)
def test_what_launchers_say(
    values: dict[str, str], expected: tuple[int, int, int, int | None], place: pytest.MonkeyPatch
) -> None:
    for name, value in values.items():
        place.setenv(name, value)
    assert ProcessPlacement.from_environment() == ProcessPlacement(*expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "1"}, f"RANK='1' in the environment is not 0, {ONE}"),
        ({"LOCAL_RANK": "2"}, f"LOCAL_RANK='2' in the environment is not 0, {ONE}"),
        ({"LOCAL_WORLD_SIZE": "abc"}, f"LOCAL_WORLD_SIZE='abc' in the environment is not 1, {ONE}"),
        ({"WORLD_SIZE": "-1"}, "^WORLD_SIZE='-1' in the environment is not a whole number from 1 to 1,048,576: unset"),
        *(
            ({"WORLD_SIZE": size}, f"^WORLD_SIZE='{size}' .* is not a whole")
            for size in ("0", "x", "²", "1.0", "9" * 5000)
        ),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "^RANK='2' .* whole number from 0 to 1, as it is where WORLD_SIZE is 2: "),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "^LOCAL_WORLD_SIZE='3' .* from 1 to 2, .* WORLD_SIZE is 2: "),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "2"},
            "^LOCAL_RANK='2' .* from 0 to 1, as it is where LOCAL_WORLD_SIZE is 2: ",
        ),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, str], message: str, place: pytest.MonkeyPatch) -> None:
    for name, value in values.items():
        place.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        ProcessPlacement.from_environment()


def test_a_process_group_that_is_there_says_rank_and_size(place: pytest.MonkeyPatch) -> None:
    place.setenv("LOCAL_RANK", "1")
    assert ProcessPlacement.from_environment((1, 2)) == ProcessPlacement(1, 2, 1, None)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK='1' .* is not 0, as it is where WORLD_SIZE is 1"):
        ProcessPlacement.from_environment((0, 1))


@pytest.mark.parametrize("values", [{"RANK": "1"}, {"WORLD_SIZE": "-1"}, {"LOCAL_WORLD_SIZE": "abc"}])
def test_a_run_does_not_begin(values: dict[str, str], place: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ((name, value),) = values.items()
    place.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name}='{value}' in the environment"):
        train(small.config(tmp_path / "data", tmp_path / "run"))
