"""The LoRA adapters that are served beside the model: names that requests give, and who still needs which."""

import asyncio
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from roofline.common import log
from roofline.common.errors import CapacityError, ConfigError, RequestError, UnsupportedError
from roofline.engine.adapter_info import AdapterInfo, adapted_fingerprint
from roofline.engine.facade import AsyncEngine

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}")


@dataclass(eq=False)
class ServedAdapter:
    """An adapter under a name. uses: requests that have not ended; leaving: no new ones come."""

    name: str
    info: AdapterInfo
    created: int  # Unix time
    uses: int = 0
    leaving: bool = False


def named_path(argument: str, what: str = "adapter") -> tuple[str, str]:
    """The name and the folder of NAME=PATH. Raises ConfigError. what: the thing that is named."""
    name, equals, path = argument.partition("=")
    if not equals or not path or not NAME.fullmatch(name):
        raise ConfigError(f"{what} {argument[:100]!r}: give it as NAME=PATH, the name of letters, digits and ._/:@-")
    return name, path


class ServedAdapters:
    """Loads and unloads adapters by name, within a budget of memory.

    Args:
        models: the names of the served model, which no adapter may have.
        first: names and folders that are loaded once the engine is there.
        max_bytes: of all that are loaded.
    """

    def __init__(
        self, engine: AsyncEngine, models: Sequence[str], max_bytes: int, first: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._engine, self._models, self._max_bytes, self._first = engine, models, max_bytes, tuple(first)
        self._named: dict[str, ServedAdapter] = {}
        self._leaving: set[ServedAdapter] = set()
        self._lock = asyncio.Lock()
        self.loading = bool(self._first)  # whether the first ones are not there yet
        names = [*models, *(name for name, _ in self._first)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"two models would be called {twice!r}: give each adapter a name of its own")

    @property
    def all(self) -> list[ServedAdapter]:
        """Those that requests may name, in the order in which they were loaded."""
        return list(self._named.values())

    def get(self, name: str) -> ServedAdapter | None:
        return self._named.get(name)

    def named(self, name: str) -> str | None:
        """The name itself where it is an adapter's, None for the model's."""
        return name if name in self._named else None

    async def load_first(self) -> None:
        """Load those that the server was started with. Raises as the engine does."""
        for name, path in self._first:
            await self.load(name, path)
        self.loading = False

    async def load(self, name: str, path: str) -> ServedAdapter:
        """Raises RequestError for a name that cannot be used, and what the engine raises."""
        if not NAME.fullmatch(name):
            message = "name: must have 1 to 128 letters, digits and ._/:@-, and begin with a letter or digit."
            raise RequestError(400, "invalid_value", message, param="name")
        async with self._lock:
            if name in self._models or name in self._named:
                raise RequestError(409, "name_in_use", f"name: {name!r} is served already.", param="name")
            bytes_by_digest = {
                adapter.info.digest: adapter.info.nbytes for adapter in (*self._named.values(), *self._leaving)
            }
            info = await self._engine.load_adapter(path, self._max_bytes - sum(bytes_by_digest.values()))
            served = self._named[name] = ServedAdapter(name, info, int(time.time()))
        log.get("server").info("adapter %s: rank %d, %d bytes, from %s", name, info.rank, info.nbytes, path)
        return served

    def unload(self, name: str) -> ServedAdapter:
        """Take no new requests for it; it is forgotten when those it has are ended. Raises RequestError 404."""
        served = self._named.pop(name, None)
        if served is None:
            raise RequestError(404, "adapter_not_found", f"There is no adapter {name[:100]!r}.", param="name")
        served.leaving = True
        self._leaving.add(served)
        self._forget_idle(served)
        return served

    @contextmanager
    def used(self, name: str | None) -> Iterator[str]:
        """Around a request with the adapter of that name: its digest; "" for None. Raises RequestError 404 for one that
        was unloaded since the request was read."""
        if name is None:
            yield ""
            return
        served = self._named.get(name)
        if served is None:
            raise RequestError(404, "model_not_found", f"The adapter {name[:100]!r} has been unloaded.", param="model")
        served.uses += 1
        try:
            yield served.info.digest
        finally:
            served.uses -= 1
            self._forget_idle(served)

    def fingerprint(self, base: str, name: str) -> str:
        """What answers of that name were computed from; base: the fingerprint of the model without adapters."""
        served = self._named.get(name)
        return adapted_fingerprint(base, None if served is None else served.info.digest)

    def _forget_idle(self, served: ServedAdapter) -> None:
        if served.leaving and not served.uses and served in self._leaving:
            self._leaving.discard(served)
            self._engine.unload_adapter(served.info.digest)


def as_refusal(error: ConfigError | UnsupportedError | CapacityError) -> RequestError:
    """What a client is told of an adapter that cannot be loaded."""
    return RequestError(400, "adapter_not_loaded", str(error), param="path")
