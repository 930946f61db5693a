"""Traffic from recorded traces: when requests came and how long they were, with texts of ours."""

import re
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path

import msgspec

from roofline.bench.traffic.random_integers import RandomIntegers
from roofline.bench.traffic.texts import prose
from roofline.bench.traffic.traffic import Traffic, TrafficRequest
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of

BLOCK = 512  # tokens that a hash of a Mooncake trace stands for
MOST_TOKENS = 1 << 20  # of a prompt or an answer: longer ones are taken for damage
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?")


class _MooncakeRow(msgspec.Struct):
    timestamp: int  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def from_trace(path: Path, requests: int | None = None, seed: int = 0) -> Traffic:
    """The traffic of a trace: Mooncake's JSON lines, or Azure's CSV with the header
    TIMESTAMP,ContextTokens,GeneratedTokens. Blocks of a Mooncake trace with the same hash get the same text.

    requests: only the first so many. Raises ConfigError, naming file and line, for a row that is malformed.
    """
    try:
        lines = path.read_text("utf-8").split("\n")  # not splitlines: JSON may hold U+2028
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {cause_of(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}; name a trace in UTF-8") from error
    azure = lines[0].lstrip("\ufeff").strip() == _AZURE_HEADER
    rows = _azure(path, lines[1:], seed) if azure else _mooncake(path, lines, seed)
    taken: list[TrafficRequest] = []
    for number, row in rows:
        _check(path, number, row, taken)
        taken.append(row)
        if len(taken) == requests:
            break
    if not taken:
        raise ConfigError(f"{path} has no requests; name a trace of Mooncake (JSON lines) or of Azure (CSV)")
    start = taken[0].at_us or 0
    shifted = [msgspec.structs.replace(row, at_us=(row.at_us or 0) - start) for row in taken]
    source = f"{'Azure' if azure else 'Mooncake'} trace {path.name}; the texts are ours"
    return Traffic(name="trace", version=1, seed=seed, stop="ignored", source=source, requests=shifted)


def _check(path: Path, number: int, row: TrafficRequest, before: list[TrafficRequest]) -> None:
    if not 1 <= row.prompt_tokens <= MOST_TOKENS or not 1 <= row.max_tokens <= MOST_TOKENS:
        lengths = f"{row.prompt_tokens} tokens of prompt and {row.max_tokens} of answer"
        raise ConfigError(f"{path}, line {number}: {lengths} are not between 1 and {MOST_TOKENS:,}; mend or remove it")
    if before and (row.at_us or 0) < (before[-1].at_us or 0):
        raise ConfigError(f"{path}, line {number}: the request comes before the one above it; sort the trace by time")


def _mooncake(path: Path, lines: Iterable[str], seed: int) -> Iterator[tuple[int, TrafficRequest]]:
    fallback_texts = RandomIntegers(seed, "mooncake texts")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_MooncakeRow)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path}, line {number} is no row of a Mooncake trace: {error}") from error
        tokens = min(max(row.input_length, 0), MOST_TOKENS + 1)
        blocks, tokens_left = [], tokens
        for hash_id in row.hash_ids:
            size = min(BLOCK, tokens_left)
            blocks.append(prose(RandomIntegers(seed, f"mooncake block {hash_id}"), size))
            tokens_left -= size
        if tokens_left:
            blocks.append(prose(fallback_texts, tokens_left))
        text = " ".join(filter(None, blocks))
        yield (
            number,
            TrafficRequest(
                prompt=text,
                prompt_tokens=row.input_length,
                max_tokens=row.output_length,
                at_us=row.timestamp * 1000,
            ),
        )


def _azure(path: Path, lines: Iterable[str], seed: int) -> Iterator[tuple[int, TrafficRequest]]:
    texts = RandomIntegers(seed, "azure texts")
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 3 or not cells[1].isdecimal() or not cells[2].isdecimal():
            raise ConfigError(f"{path}, line {number} is no row of {_AZURE_HEADER}: {line[:80]!r}")
        prompt, answer = int(cells[1]), int(cells[2])
        text = prose(texts, min(prompt, MOST_TOKENS + 1))
        moment = _microseconds(path, number, cells[0])
        yield number, TrafficRequest(prompt=text, prompt_tokens=prompt, max_tokens=answer, at_us=moment)


def _microseconds(path: Path, number: int, text: str) -> int:
    """Of a date with a time of day, since the year 1."""
    match = _AZURE_TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
        days = date(year, month, day).toordinal()
    except ValueError:
        raise ConfigError(f"{path}, line {number}: {text!r} is no time such as 2023-11-16 18:15:46.6805900") from None
    fraction = int((match[7] or "0").ljust(9, "0")) // 1000
    return ((days * 24 + hour) * 60 + minute) * 60_000_000 + second * 1_000_000 + fraction
