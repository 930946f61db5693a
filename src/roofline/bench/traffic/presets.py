"""The kinds of traffic that load tests are run with, each a function of its size and its seed alone.

Where a benchmark publishes only the maxima of its lengths, the shapes are ours (`lengths.toml`), and so are all texts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from roofline.bench.traffic.random_integers import RandomIntegers
from roofline.bench.traffic.texts import lengths, pool_of, pooled_prompt, prose
from roofline.bench.traffic.traffic import Traffic, TrafficRequest
from roofline.common.errors import ConfigError
from roofline.common.names import unknown

Requests = Iterator[TrafficRequest]
POOL = 64  # templates of the Dell sweep
TURNS = 6  # at most, of a conversation
ROCM_BATCHES, ROCM_PROMPT, ROCM_ANSWER = (1, 8, 16), 2048, 32


@dataclass(frozen=True)
class Preset:
    """A kind of traffic. version: raised whenever its bytes change; requests: of a file, where nothing else is said;
    stop, source: as in `Traffic`; make: the requests, so many for a seed."""

    version: int
    requests: int
    stop: str
    source: str
    make: Callable[[int, int], Requests]


def preset_traffic(name: str, requests: int | None = None, seed: int = 0, stop: str | None = None) -> Traffic:
    """The traffic of a preset. requests, stop: None takes the preset's own. Results name it by the hash of the file
    with the preset's own number of requests, of which others have the beginning, or go on behind its end.

    Raises ConfigError for a name that is none, and for traffic without a request.
    """
    if name not in PRESETS:
        raise ConfigError(unknown("preset of traffic", name, PRESETS))
    preset = PRESETS[name]
    count = preset.requests if requests is None else requests
    if count < 1:
        raise ConfigError(f"traffic of {count} requests cannot be sent; ask for at least 1")
    requests_of_preset = list(preset.make(max(count, preset.requests), seed))
    traffic = Traffic(
        name=name,
        version=preset.version,
        seed=seed,
        stop="natural" if (stop or preset.stop) == "natural" else "ignored",
        source=preset.source,
        requests=requests_of_preset[: preset.requests],
    )
    return msgspec.structs.replace(traffic, requests=requests_of_preset[:count], definition=traffic.file_sha256)


def singles(prompts: Sequence[int], answer: int, repeats: int, seed: int = 0, natural: bool = False) -> Traffic:
    """Requests of fixed lengths: so many of each length of prompts, in turn. Results name it by the answers' length
    and the seed; the prompts' is that of a point."""
    random = RandomIntegers(seed, "singles texts")
    requests = [
        TrafficRequest(prompt=prose(random, prompt), prompt_tokens=prompt, max_tokens=answer)
        for prompt in prompts
        for _ in range(repeats)
    ]
    source = f"prompts of {', '.join(map(str, prompts))} tokens, answers of {answer}"
    stop: Literal["natural", "ignored"] = "natural" if natural else "ignored"
    alike = Traffic(name="singles", version=1, seed=seed, stop=stop, source=f"answers of {answer} tokens", requests=[])
    return msgspec.structs.replace(alike, source=source, requests=requests, definition=alike.file_sha256)


def _drawn(name: str, context: int) -> Callable[[int, int], Requests]:
    """Independent requests whose lengths are those of two tables; a prompt leaves its answer room in the context."""

    def make(count: int, seed: int) -> Requests:
        sizes, words = RandomIntegers(seed, f"{name} lengths"), RandomIntegers(seed, f"{name} texts")
        for _ in range(count):
            answer = sizes.length(lengths(f"{name}_answer"))
            prompt = min(sizes.length(lengths(f"{name}_prompt")), context - answer)
            yield TrafficRequest(prompt=prose(words, prompt), prompt_tokens=prompt, max_tokens=answer)

    return make


def _pooled(count: int, seed: int) -> Requests:
    random = RandomIntegers(seed, "dell texts")
    pool = pool_of(RandomIntegers(seed, "dell pool"), POOL)
    for number in range(count):
        prompt = pooled_prompt(random, pool, number)
        yield TrafficRequest(prompt=prompt, prompt_tokens=len(prompt.split()), max_tokens=256)


def _single(count: int, seed: int) -> Requests:
    random = RandomIntegers(seed, "mlc texts")
    for _ in range(count):
        yield TrafficRequest(prompt=prose(random, 1), prompt_tokens=1, max_tokens=512)


def _grid(count: int, seed: int) -> Requests:
    """Prefill and then decode of 1, 8 and 16 requests at once, again and again until there are so many requests."""
    random = RandomIntegers(seed, "rocm texts")
    cells = [(size, *shape) for size in ROCM_BATCHES for shape in ((ROCM_PROMPT, 1), (1, ROCM_ANSWER))]
    for number in range(count):
        at = number % sum(size for size, _, _ in cells)
        for size, prompt, answer in cells:
            if at < size:
                yield TrafficRequest(prompt=prose(random, prompt), prompt_tokens=prompt, max_tokens=answer)
                break
            at -= size


def _conversations(count: int, seed: int) -> Requests:
    sizes, words = RandomIntegers(seed, "turn lengths"), RandomIntegers(seed, "turn texts")
    number = session = 0
    while number < count:
        for turn in range(min(1 + sizes.below(TURNS), count - number)):
            prompt = sizes.length(lengths("chat_prompt" if turn == 0 else "turn_prompt"))
            answer = sizes.length(lengths("turn_answer"))
            yield TrafficRequest(
                prompt=prose(words, prompt), prompt_tokens=prompt, max_tokens=answer, session=session, turn=turn
            )
            number += 1
        session += 1


_OURS = "only the maxima are published, the shapes are ours"
PRESETS = {
    "typical": Preset(
        1, 1024, "ignored", f"MK1 Flywheel, 2023: context up to 960, answers up to 80; {_OURS}", _drawn("typical", 960)
    ),
    "long": Preset(
        1, 1024, "ignored", f"MK1 Flywheel, 2023: context up to 1800, answers up to 120; {_OURS}", _drawn("long", 1800)
    ),
    "dell": Preset(
        1, 4096, "natural", "Dell and Metrum, 2024: prompts of 32 words on average, answers up to 256 tokens", _pooled
    ),
    "mlc": Preset(1, 3, "ignored", "MLC, 2023: a prompt of 1 token, an answer of 512, one request at a time", _single),
    "rocm": Preset(
        1, 50, "ignored", "ROCm blog, 2024: batches of 1, 8 and 16, 2048 + 1 tokens and 1 + 32 tokens", _grid
    ),
    "chat": Preset(
        1, 1024, "ignored", "first turns of conversations like ShareGPT's; the shapes are ours", _drawn("chat", 2048)
    ),
    "multi-turn": Preset(1, 1024, "ignored", "conversations of 1 to 6 turns; the shapes are ours", _conversations),
}
