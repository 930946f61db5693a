"""The adapters that an engine has loaded, by the digests of their content, and which requests still need them."""

from collections.abc import Callable

from roofline.backends.base import Adapts, Executable
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.engine.adapter_info import AdapterInfo, unknown_adapter
from roofline.engine.config import EngineConfig


class Adapters:
    """Slots of an executable, given to adapters while they are loaded and some request has yet to end.

    config: says how many may be loaded, of how many bytes. in_use: whether requests that have not ended name a slot.
    most: how many may be loaded.
    """

    def __init__(self, executable: Executable, config: EngineConfig, in_use: Callable[[int], bool]) -> None:
        self._executable, self._in_use = executable, in_use
        self.most, self._max_bytes = config.max_adapters or 0, config.adapter_bytes
        self._loaded: dict[str, tuple[int, AdapterInfo]] = {}
        self._leaving: set[str] = set()

    def load(self, path: str, digest: str | None = None, max_bytes: int | None = None) -> AdapterInfo:
        """Load a folder of PEFT's files, or a GGUF file.

        digest: what it must have; max_bytes: that it may take in memory, beside what the engine's adapter_bytes leaves.

        What is loaded already is not loaded again. Raises ConfigError, UnsupportedError and CapacityError.
        """
        executable = self._executable
        if not isinstance(executable, Adapts):
            raise UnsupportedError("adapters on this backend", "it does not compute them", ("backend=cpu",))
        if not self.most:
            raise ConfigError(
                "the model was loaded without places for adapters; load it with max_adapters of 1 or more, as "
                "`roofline serve --max-adapters` does"
            )
        from roofline.weights.adapters import read_adapter, too_large

        adapter = read_adapter(path, self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes))
        if digest is not None and adapter.digest != digest:
            raise ConfigError(f"{path} is not the adapter that was loaded before: its files have changed")
        self._leaving.discard(adapter.digest)
        if adapter.digest in self._loaded:
            return self._loaded[adapter.digest][1]
        used_slots = {slot for slot, _ in self._loaded.values()}
        slot = next((slot for slot in range(1, self.most + 1) if slot not in used_slots), None)
        if slot is None:
            remedy = "Unload one, or load the model with a larger max_adapters."
            raise CapacityError("another adapter", self.most + 1, self.most, "adapters", remedy)
        free_bytes = self._max_bytes - sum(info.nbytes for _, info in self._loaded.values())
        if adapter.nbytes > free_bytes:
            raise too_large(path, adapter.nbytes, free_bytes)
        executable.adapters.set(slot, adapter.matrices)
        info = AdapterInfo(adapter.digest, str(path), adapter.rank, len(adapter.matrices), adapter.nbytes)
        self._loaded[adapter.digest] = slot, info
        return info

    def unload(self, digest: str) -> None:
        """Take no new requests for it, and forget it once those it has are ended. Not loaded: nothing to do."""
        if digest in self._loaded:
            self._leaving.add(digest)
            self.forget_idle()

    def slot(self, digest: str) -> int:
        """The slot of a request's adapter, 0 for "". Raises RequestError 404 where it is not loaded."""
        if not digest:
            return 0
        if digest not in self._loaded or digest in self._leaving:
            raise unknown_adapter()
        return self._loaded[digest][0]

    def info(self, slot: int) -> AdapterInfo:
        """The adapter of a slot that some request has."""
        return next(info for number, info in self._loaded.values() if number == slot)

    def forget_idle(self) -> None:
        """Free the slots of those that are leaving and that no request needs."""
        for digest in [digest for digest in self._leaving if not self._in_use(self._loaded[digest][0])]:
            slot, _ = self._loaded.pop(digest)
            self._leaving.discard(digest)
            assert isinstance(self._executable, Adapts), "it has an adapter"
            self._executable.adapters.free(slot)
