"""What each key has used, for the operator: these families tell the names of all keys."""

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest

MAX_NAMES = 1000  # label values; what keys beyond them use is counted together
OTHERS = "(others)"


class KeyMetrics:
    """Families by key, in a registry of their own."""

    def __init__(self) -> None:
        self._registry, self._names = CollectorRegistry(), set[str]()

        def counter(name: str, meaning: str) -> Counter:
            return Counter(f"roofline:key_{name}", meaning, ["key"], registry=self._registry)

        self._requests = counter("requests", "Requests of a key that were admitted.")
        self._refused = counter("refused", "Requests of a key that were answered with 429.")
        self._prompt = counter("prompt_tokens", "Prompt tokens that were computed for it.")
        self._generated = counter("generation_tokens", "Tokens that were generated for it.")

    def admitted(self, key: str) -> None:
        self._requests.labels(self._label(key)).inc()

    def prompt_computed(self, key: str, prompt_tokens: int) -> None:
        self._prompt.labels(self._label(key)).inc(prompt_tokens)

    def refused(self, key: str) -> None:
        self._refused.labels(self._label(key)).inc()

    def generated(self, key: str, tokens: int) -> None:
        self._generated.labels(self._label(key)).inc(tokens)

    def exposition(self) -> bytes:
        """All in Prometheus' text form."""
        return generate_latest(self._registry)

    def _label(self, key: str) -> str:
        """A file of keys may be replaced any number of times; label values never go away again."""
        if key not in self._names and len(self._names) >= MAX_NAMES:
            return OTHERS
        self._names.add(key)
        return key
