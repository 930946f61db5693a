"""Recorded traces become traffic; a row that is malformed is named by its line."""

import pytest

from roofline.bench.traffic.traces import from_trace
from roofline.common.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-17 00:00:00,5,1
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 500, "hash_ids": [46, 47, 48]}
{"timestamp": 4500, "input_length": 1024, "output_length": 3, "hash_ids": [46, 47]}
{"timestamp": 4500, "input_length": 600, "output_length": 3, "hash_ids": [46, 99]}
"""


@pytest.fixture
def trace(tmp_path):
    def write(text):
        path = tmp_path / "trace"
        path.write_text(text)
        return path

    return write


def test_azure(trace):
    traffic = from_trace(trace(AZURE))
    assert [(r.at_us, r.prompt_tokens, r.max_tokens) for r in traffic.requests] == [
        (0, 374, 44),
        (4314579, 396, 109),
        (20653319410, 5, 1),
    ]
    assert len(traffic.requests[2].prompt.split()) == 5


def test_mooncake_gives_equal_hashes_equal_texts(trace):
    first, second, third = (request.prompt.split() for request in from_trace(trace(MOONCAKE)).requests)
    assert [request.at_us for request in from_trace(trace(MOONCAKE)).requests] == [0, 3_500_000, 3_500_000]
    words = 512 - 512 // 12  # a full stop is a token, and no word
    assert first[: 2 * words] == second
    assert first[:words] == third[:words]
    assert first[words : words + 8] != third[words : words + 8]


def test_the_bytes_are_pinned(trace):
    assert from_trace(trace(MOONCAKE)).sha256[:16] == "fe6f30f0f31388b6"
    assert from_trace(trace(AZURE), 2).sha256[:16] == "9fa5e72b1f24a68c"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE + "2023-11-17 00:00:01,5\n", "line 5 is no row of TIMESTAMP"),
        (AZURE + "2023-11-17 00:00:01,5,-1\n", "line 5 is no row"),
        (AZURE + "2023-11-31 00:00:01,5,1\n", "line 5: '2023-11-31 00:00:01' is no time"),
        (AZURE + "yesterday,5,1\n", "line 5: 'yesterday' is no time"),
        (AZURE + "2023-11-16 00:00:01,5,1\n", "line 5: the request comes before the one above it; sort"),
        (AZURE + "2023-11-17 00:00:01,0,1\n", "line 5: 0 tokens of prompt"),
        (MOONCAKE + '{"timestamp": 5000, "input_length": 10}\n', "line 4 is no row of a Mooncake trace"),
        (MOONCAKE + '{"timestamp": 5000, "input_length": 99000000, "output_length": 1}\n', "line 4: 99000000 tokens"),
        ("", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
    ],
)
def test_malformed_rows_are_named(trace, text, message):
    with pytest.raises(ConfigError, match=message):
        from_trace(trace(text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        from_trace(tmp_path / "none")
