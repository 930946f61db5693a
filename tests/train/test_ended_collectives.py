"""Memory that ends inside a collective, of which the others may have seen anything: all ranks end, with a line each."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training is torch")

from roofline.train.run_folder import LOG, read_lines
from tests.train import small
from tests.train.test_exhausted_ranks import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
LOST = "another process of this run has ended; what it said stands above"

# Processes, a kind of run, the rank whose memory ends, the method of torch's process group, at which of its calls, and
# whether the rank has taken part. In each microbatch two blocks and what is around them are reduced, each by a call.
Place = tuple[int, str, int, str, int, bool]
SUMS_OF_TWO: list[Place] = [(2, "copies", rank, "allreduce", 3 * rank, bool(rank)) for rank in (0, 1)]
SUMS: list[Place] = [
    *((2, "copies", 1, "allreduce", at, part) for at in (1, 2, 5) for part in (False, True)),
    *((2, "hybrid", 0, "allreduce", at, False) for at in (0, 5)),
    *((4, "copies_of_two", rank, "allreduce", at, bool(at % 2)) for rank in (0, 3) for at in (0, 1, 5)),
]
OTHERS: list[Place] = [
    (4, "copies_of_two", 2, "reduce_scatter_single", 2, False),
    (4, "copies_of_two", 1, "reduce_scatter_single", 5, True),
    (4, "copies_of_two", 3, "all_gather_single", 4, True),
    (2, "full", 1, "reduce_scatter_single", 0, True),
    (2, "full", 0, "all_gather_single", 3, False),
    (2, "elastic", 1, "all_to_all_single", 1, False),
    (4, "elastic", 2, "all_to_all_single", 2, True),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "places",
    [
        pytest.param(SUMS_OF_TWO, id="sums-of-two"),
        pytest.param(SUMS, id="sums", marks=pytest.mark.soak),
        pytest.param(OTHERS, id="others", marks=pytest.mark.soak),
    ],
)
def test_all_ranks_end_with_a_line_and_no_step_is_made(places: list[Place], tmp_path: Path) -> None:
    data = small.write_rows(tmp_path / "data", 60)
    groups: list[tuple[int, list[dict[str, Any]]]] = []
    for number, (count, kind, *ends) in enumerate(places):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        rows = 24 if kind == "elastic" else 12 * count
        common = {"global_train_batch_size": rows, "dist_timeout": 60, "memory_limit": "8gb", "max_duration": "2ba"}
        given = small.mapping(data, folder, **common, device_train_microbatch_size="auto", **KINDS[kind])
        groups.append((count, [given | {"ends": ends}]))
    (tmp_path / "groups.json").write_text(json.dumps(groups))
    command = [sys.executable, "-m", "tests.train.ended_collectives", str(tmp_path / "groups.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for number, (count, _, failing, *_) in enumerate(places):
        folder = tmp_path / f"run-{number}"
        messages = [(folder / f"told-{rank}.txt").read_text() for rank in range(count)]
        assert messages.pop(failing).startswith(f"training on rank {failing} needs 8,000,000,001 bytes, "), messages
        assert messages == [LOST] * (count - 1), places[number]
        assert not [line for line in read_lines(folder / LOG) if "loss" in line], places[number]
