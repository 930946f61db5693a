"""What all processes of a run must have alike: it is compared when they join, and a difference is refused by name."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

import roofline
from roofline.common import env
from roofline.common.errors import ConfigError, SaidElsewhere
from roofline.common.fingerprint import fingerprint
from roofline.common.json_types import JsonObject
from roofline.train.config.schema import FsdpSection, TrainConfig
from roofline.train.run_folder import checkpoints_of

if TYPE_CHECKING:
    from roofline.train.parallel.processes import World

# Keys that a host may have its own values of. They change where and how it reads, waits and shows, not what it
# computes; what lies in the places is compared when it is opened.
OF_A_HOST = frozenset(
    {
        "cache_limit",
        "console_log_interval",
        "dist_timeout",
        "expandable_segments",
        "hf_kwargs",
        "local",
        "log_to_console",
        "loggers",  # of the first process alone
        "memory_limit",
        "num_workers",
        "persistent_workers",
        "pin_memory",
        "predownload",
        "prefetch_factor",
        "progress_bar",
        "run_folder",
        "run_name",
        "timeout",
    }
)
# Keys of which every host has a place or none has: a URL is the same on all of them, a path need not be.
PLACES = frozenset({"hf_name", "load_path", "pretrained_model_name_or_path", "remote", "save_folder", "tokenizer.name"})
SAME_FILE = "Give all processes the same configuration file and the same changes of it"
SAME_DATA = "Give all hosts the same data, and the same files of a model to begin with"
SAME_CODE = "Install the same on all hosts"
_SHOWN, _OTHERS = 60, 3  # characters of a value, and further keys, that a message has


def of_code() -> JsonObject:
    """The versions that a run depends on, of Roofline with a hash of its Python files."""
    # Builds of torch for other devices are another matter: a host without an accelerator joins as a CPU or not at all.
    return {
        "Roofline": f"{roofline.__version__} (source {fingerprint()[:8]})",
        "torch": torch.__version__.partition("+")[0],
    }


def of_config(config: TrainConfig, device: torch.device) -> JsonObject:
    """The values of a configuration that all processes must have alike, by their dotted keys."""
    sections = config.model_dump(mode="json") | {"device": device.type, "save_folder": checkpoints_of(config)}
    values = {key: value for key, value in _flat(sections) if value is not None}
    section = config.fsdp_config or FsdpSection()
    if section.sharding_strategy == "HYBRID_SHARD" and section.hybrid_group is None:
        values["the number of processes of a host, which is fsdp_config.hybrid_group,"] = env.foreign(
            "LOCAL_WORLD_SIZE"
        )
    return values


def check(world: "World", values: JsonObject, remedy: str) -> None:
    """Raise ConfigError on all ranks if they have different values, with the first key that differs; a host's user sees
    it once."""
    text = json.dumps(values, sort_keys=True)
    if len({*world.every(hashlib.sha256(text.encode()).hexdigest())}) == 1:
        return
    message = f"the processes of this run differ: {difference(world.every(values))}. {remedy}"
    speaks = (env.foreign("LOCAL_RANK") or "0") == "0"
    raise ConfigError(message) if speaks else SaidElsewhere(message)


def difference(values: Sequence[Mapping[str, object]]) -> str:
    """The first key with different values, and which ranks have which; values: by key, of each rank."""
    keys = dict.fromkeys(key for of_rank in values for key in of_rank)
    texts = {key: [json.dumps(of_rank.get(key)) for of_rank in values] for key in keys}
    key, *more = (key for key, of_ranks in texts.items() if len({*of_ranks}) > 1)
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts[key]):
        ranks.setdefault(text, []).append(rank)
    words = ", ".join(f"{_shown(text)} on {_counted(numbers)}" for text, numbers in ranks.items())
    further = [*more[:_OTHERS], *([f"{len(more) - _OTHERS} more"] if len(more) > _OTHERS else [])]
    return f"{key} is {words}" + (f" (other differences: {', '.join(further)})" if more else "")


def _flat(node: object, stem: str = "", of_user: bool = False) -> Iterator[tuple[str, object]]:
    """(dotted key, value) of all values that are compared; of a path, that it is one. of_user: the last name is no
    key."""
    *_, before, last = ["", *stem.split(".")]
    is_place = last in PLACES or f"{before}.{last}" in PLACES
    if not of_user and last in OF_A_HOST:
        return
    if not of_user and is_place and isinstance(node, str):
        yield stem, node if "://" in node else "a path"
    elif stem == "callbacks.own":  # made in the first process, with options for it alone
        yield stem, ", ".join(sorted(node)) if isinstance(node, dict) else None
    elif isinstance(node, dict):
        for name, value in node.items():
            yield from _flat(value, f"{stem}.{name}".lstrip("."), last == "streams")
    elif isinstance(node, list) and any(isinstance(value, dict) for value in node):
        yield f"{stem}.count", len(node)
        for number, value in enumerate(node):
            yield from _flat(value, f"{stem}.{number}")
    else:
        yield stem, node


def _shown(text: str) -> str:
    """A value's JSON, as a message has it."""
    words = "not set" if text == "null" else text.strip('"')
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def _counted(numbers: Sequence[int]) -> str:
    """The numbers of ranks in words, those that follow each other as a range."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    words = [f"{some[0]} to {some[-1]}" if len(some) > 2 else " and ".join(map(str, some)) for some in ranges]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(words)}"
