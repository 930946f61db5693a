"""The table of backends: where each one's object is, imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

from roofline.common import extensions
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.names import did_you_mean

if TYPE_CHECKING:
    from roofline.backends.backend import Backend

# name -> "module:object", or the object itself. Extensions add to it (`roofline.extend.register_backend`).
_BACKENDS: "dict[str, str | Backend]" = {
    "cpu": "roofline.backends.cpu.backend:BACKEND",
    "gpu": "roofline.backends.gpu.backend:BACKEND",
    "reference": "roofline.backends.reference.backend:BACKEND",
    "simulated": "roofline.backends.simulated.backend:BACKEND",
}


def names(needed: str = "cpu") -> tuple[str, ...]:
    """The names of all backends. Extensions are loaded first where `needed` is none of those registered so far."""
    if needed not in _BACKENDS:
        extensions.load()
    return tuple(_BACKENDS)


def register(name: str, backend: "str | Backend") -> None:
    """Add a backend. Raises ConfigError when the name is taken."""
    if name in _BACKENDS:
        raise ConfigError(f"a backend named {name!r} is already registered")
    _BACKENDS[name] = backend


def require(name: str) -> None:
    """Raises UnsupportedError, with the names there are, where no backend has this one."""
    if name not in names(name):
        reason = f"there is no such backend{did_you_mean(name, names())}"
        raise UnsupportedError(f"backend {name!r}", reason, names())


def get(name: str) -> "Backend":
    """The backend of that name. Raises UnsupportedError as `require`."""
    require(name)
    backend = _BACKENDS[name]
    if isinstance(backend, str):
        module, _, attribute = backend.partition(":")
        backend = getattr(import_module(module), attribute)
    return backend
