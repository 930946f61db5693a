"""The bytes of each preset, pinned; and that they are what their sources say."""

import itertools

import msgspec
import pytest

from roofline.bench.traffic.presets import PRESETS, preset_traffic, singles
from roofline.bench.traffic.traffic import read_traffic, write_traffic
from roofline.common.errors import ConfigError

# A change of one of these is a change of what everybody measured before: raise the preset's version with it.
GOLDEN = {
    "typical": (1, "dc1e749e71f4f04437441ce9f18856c758322e387eb6657bb828bd4f27c370dc"),
    "long": (1, "c30a246078ebbd061b617e5bb01d29c52de270fe74e1a5478ce588bd3bdde0f1"),
    "dell": (1, "25bc0b3dad198cde00c965f8648f45b8344c3524bf76bbfdd1095ffe5a62b77e"),
    "mlc": (1, "df29851bb40d1f1969aa5a75af22aad6d01c24cea341ee1a75530e41ea2618bd"),
    "rocm": (1, "31f8471b3b523c05b98cb1eadf1fc9e877c692792a70b229fe8d9d50941b8c88"),
    "chat": (1, "7267a71f31a776f6ffd0437df5d6b2fbbd61732331eaed81bf1130b0bd9c9f8f"),
    "multi-turn": (1, "ec9295abe0298d1c598a452ad48ce8367d6d6b93c59fb387fb6fc41ab8a01c38"),
}


# The long one takes seconds to draw.
QUICK_FIRST = [pytest.param(name, marks=pytest.mark.slow) if name == "long" else name for name in PRESETS]


@pytest.mark.parametrize("name", PRESETS)
def test_bytes_are_pinned(name):
    assert (PRESETS[name].version, preset_traffic(name).sha256) == GOLDEN[name]


@pytest.mark.parametrize("name", QUICK_FIRST)
def test_another_seed_gives_other_bytes_and_the_same_seed_the_same(name):
    assert preset_traffic(name, 50).file_sha256 == preset_traffic(name, 50).file_sha256
    one, other = (preset_traffic(name, 50, seed) for seed in (0, 1))
    assert one.requests[0].prompt != other.requests[0].prompt


@pytest.mark.parametrize("name", PRESETS)
def test_fewer_requests_are_the_beginning_of_more(name):
    assert preset_traffic(name, 20).requests[:19] == preset_traffic(name, 40).requests[:19]


@pytest.mark.parametrize(
    ("name", "context", "answer"), [("typical", 960, 80), ("long", 1800, 120), ("chat", 2048, 1024)]
)
def test_lengths_keep_to_the_maxima(name, context, answer):
    requests = preset_traffic(name).requests
    assert all(request.prompt_tokens + request.max_tokens <= context for request in requests)
    assert max(request.max_tokens for request in requests) <= answer
    assert max(request.prompt_tokens + request.max_tokens for request in requests) > 0.7 * context
    words = [len(request.prompt.replace(".", " .").split()) for request in requests]
    assert words == [request.prompt_tokens for request in requests]


def test_dell_has_prompts_of_32_words_with_salts_of_their_own():
    traffic = preset_traffic("dell")
    words = [len(request.prompt.split()) for request in traffic.requests]
    assert abs(sum(words) / len(words) - 32) < 1
    assert len({request.prompt[:12] for request in traffic.requests}) == len(traffic.requests)
    assert len({request.prompt[13:] for request in traffic.requests}) > 0.999 * len(traffic.requests)
    assert {request.max_tokens for request in traffic.requests} == {256}
    assert traffic.stop == "natural"
    assert preset_traffic("dell", 3, stop="ignored").stop == "ignored"


def test_rocm_is_prefill_and_decode_of_three_batches():
    shapes = [(request.prompt_tokens, request.max_tokens) for request in preset_traffic("rocm").requests]
    assert shapes == [shape for size in (1, 8, 16) for shape in [(2048, 1)] * size + [(1, 32)] * size]


def test_mlc_is_1_and_512():
    (request,) = preset_traffic("mlc", 1).requests
    assert (len(request.prompt.split()), request.prompt_tokens, request.max_tokens) == (1, 1, 512)


def test_conversations_have_turns_in_order():
    requests = preset_traffic("multi-turn").requests
    for before, after in itertools.pairwise(requests):
        assert (after.session, after.turn) in ((before.session, before.turn + 1), (before.session + 1, 0))
    assert {request.turn for request in requests} == set(range(6))


def test_a_file_gives_back_its_traffic(tmp_path):
    traffic = preset_traffic("multi-turn", 30)
    write_traffic(traffic, tmp_path / "t.jsonl")
    read = read_traffic(tmp_path / "t.jsonl")
    assert read == msgspec.structs.replace(traffic, definition="")
    assert read.sha256 == traffic.file_sha256 == read.file_sha256


def test_names_and_counts_that_are_wrong_are_refused():
    with pytest.raises(ConfigError, match="no preset of traffic 'typicl'; did you mean 'typical'"):
        preset_traffic("typicl")
    with pytest.raises(ConfigError, match="at least 1"):
        preset_traffic("typical", 0)


@pytest.mark.parametrize("name", QUICK_FIRST)
def test_the_hash_of_made_traffic_does_not_depend_on_how_much_is_made(name):
    few, more = preset_traffic(name, 3), preset_traffic(name, PRESETS[name].requests + 7)
    assert few.sha256 == more.sha256 == preset_traffic(name).file_sha256
    assert more.requests[:3] == few.requests
    assert few.file_sha256 != more.file_sha256
    assert len({preset_traffic(name, 3, seed).sha256 for seed in (0, 1)}) == 2
    assert preset_traffic(name, 3, stop="natural").sha256 != preset_traffic(name, 3, stop="ignored").sha256


def test_the_hash_of_singles_is_that_of_their_answers():
    assert singles((1,), 64, 5).sha256 == singles((1, 1024), 64, 3).sha256
    assert singles((1,), 64, 5).sha256 != singles((1,), 65, 5).sha256
    assert singles((1,), 64, 5).sha256 != singles((1,), 64, 5, natural=True).sha256
