"""Which keys of a record its reader used, and what becomes of the others: they are refused, or counted and named."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from roofline.common.errors import ConfigError
from roofline.common.units import counted

MEDIA = ("image", "images", "audio", "audios", "video", "videos")
# What a prompt is asked with, in the data sets that are about. An answer would be trained without it.
CONDITIONS = (
    *("system", "system_prompt", "context", "contexts", "passage", "passages", "document", "documents", "article"),
    *("paragraph", "input", "instruction", "history", "choices", "options", "tools", "functions", *MEDIA),
)
_SHOWN = 8  # keys with the same count that a line names


class RecordFields(Mapping[str, object]):
    """A record that notes which of its keys are read. A key is used when its value is asked for, and at no other time,
    so a reader cannot forget to declare one.

    remarks: what else of the record is not used, in the words of a list of keys.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values, self._read, self.remarks = values, set[str](), set[str]()

    @classmethod
    def of_record(cls, record: Mapping[str, object]) -> "RecordFields":
        """The record itself if it is noted already."""
        return record if isinstance(record, cls) else cls(record)

    def __getitem__(self, key: str) -> object:
        self._read.add(key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def peek(self, key: str) -> object:
        """The value of a key, None where there is none, without using it."""
        return self._values.get(key)

    def use_where(self, keys: Collection[str], fits: Callable[[object], bool]) -> None:
        """Count keys as used whose values say what holds anyway."""
        self._read |= {key for key in keys if fits(self._values.get(key))}

    @property
    def unread(self) -> list[str]:
        """The keys that have a value and were never asked for."""
        return [key for key, value in self._values.items() if key not in self._read and not _is_empty(value)]

    @property
    def unused(self) -> list[str]:
        """The unread keys, and the remarks."""
        return [*self.unread, *sorted(self.remarks)]

    def refuse_conditions(self, where: str, prompt: str, remedy: str, conditions: Collection[str] = CONDITIONS) -> None:
        """Raise ConfigError for an unread key that belongs to the prompt, unless the prompt has its text."""
        for key in self.unread:
            if key in conditions and not _stands_in(self._values[key], prompt):
                raise ConfigError(f"{where}: {key} would not be read, and the answer be trained without it: {remedy}")


def unused_words(counts: Mapping[str, int], noun: str = "record") -> str:
    """{"url": 2000, "id": 2000, "note": 3} as "url, id (2,000 records); note (3 records)"."""
    by_count = defaultdict[int, list[str]](list)
    for key, count in counts.items():
        by_count[count].append(key)
    return "; ".join(
        f"{_some(keys)} ({counted(count, noun)})" for count, keys in sorted(by_count.items(), key=lambda pair: -pair[0])
    )


def _some(keys: list[str]) -> str:
    further = len(keys) - _SHOWN
    return ", ".join(keys[:_SHOWN]) + (f" and {further} more" if further > 0 else "")


def _is_empty(value: object) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list | dict | tuple) and not value)


def _stands_in(value: object, prompt: str) -> bool:
    texts: Iterable[object] = [value] if isinstance(value, str) else value if isinstance(value, list) else [None]
    return all(isinstance(text, str) and text.strip() in prompt for text in texts)
