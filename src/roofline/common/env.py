"""The one list of environment variables. Nothing else in the project reads ``os.environ`` for its settings."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from roofline.common.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """One variable: its name, what it does, and the values it takes (empty: any text)."""

    name: str
    meaning: str
    choices: tuple[str, ...] = ()
    integer: bool = False
    secret: bool = False  # never shown


VARIABLES = (
    Variable(
        "ROOFLINE_HOME",
        "folder of pulled models, compiled bundles, measured roofs and tunings (default ~/.cache/roofline, or "
        "roofline-UID among the temporary files where that cannot be made)",
    ),
    Variable("ROOFLINE_BUNDLES", "`off`: models are not compiled into the cache on first use", ("on", "off")),
    Variable("ROOFLINE_TUNED", "`off`: kernel variants that `roofline tune` chose are not used", ("on", "off")),
    Variable("ROOFLINE_ISA", "forces a lower instruction set on CPUs", ("portable", "avx2", "avx512", "neon")),
    Variable("ROOFLINE_THREADS", "number of compute threads (default: usable cores)", integer=True),
    Variable("ROOFLINE_MODEL", "model that a container serves when its call names none"),
    Variable("ROOFLINE_API_KEY", "key that `roofline serve` asks for when --api-key is not given", secret=True),
    Variable("ROOFLINE_LOG", "log level", ("debug", "info", "warning", "error")),
)


def read(name: str) -> str | None:
    """The checked text of a listed variable, None when unset or empty. Raises ConfigError on a value it cannot have."""
    variable = next(v for v in VARIABLES if v.name == name)
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    if variable.choices and value.lower() not in variable.choices:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(variable.choices)}")
    if variable.integer and (not value.isdigit() or int(value) < 1):
        raise ConfigError(f"{name}={value!r} is not a whole number of at least 1")
    return value.lower() if variable.choices else value


def foreign(name: str) -> str | None:
    """A variable that other programs share with us and define, such as AWS_ENDPOINT_URL: None when unset or empty."""
    return os.environ.get(name) or None


def all_foreign() -> dict[str, str]:
    """A copy of the whole environment, for programs that stand between another one and ours."""
    return dict(os.environ)


@contextmanager
def foreign_set(name: str, value: str) -> Iterator[None]:
    """Set a variable of another program inside the block, and put back what it was."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def suggest(name: str, value: str) -> None:
    """Set a variable of another program for this process and those it starts, unless the user has set it."""
    os.environ.setdefault(name, value)


def forget(name: str) -> None:
    """Take a variable of another program out of this process's environment, and of those it starts."""
    os.environ.pop(name, None)


def quiet_numpy() -> None:
    """Call before importing numpy: keeps its BLAS, hardly used here, from starting threads that compete with ours."""
    suggest("OPENBLAS_NUM_THREADS", "1")


def printable_values() -> dict[str, str | None]:
    """All variables by name as they may be printed: of a secret only that it is set."""
    values = {variable.name: read(variable.name) for variable in VARIABLES}
    return {v.name: "(set)" if v.secret and values[v.name] else values[v.name] for v in VARIABLES}


def home() -> Path:
    """The folder that holds everything we keep between runs: ROOFLINE_HOME, else ~/.cache/roofline, else, where that
    is not there and cannot be made (containers), one of this user's among the temporary files."""
    try:
        chosen = read("ROOFLINE_HOME")
        if chosen:
            return Path(chosen).expanduser()
        standard = Path.home() / ".cache" / "roofline"
    except RuntimeError as error:  # neither HOME nor an entry in passwd
        if chosen:
            raise ConfigError(f"ROOFLINE_HOME={chosen!r}: this user has no home; name the whole path") from error
        return _temporary_home()
    there = next(folder for folder in (standard, *standard.parents) if os.path.lexists(folder))
    return standard if there == standard or os.access(there, os.W_OK | os.X_OK) else _temporary_home()


def _temporary_home() -> Path:
    """A folder that survives until temporary files are removed. Raises ConfigError where another user has made it."""
    import tempfile  # 10 ms

    folder = Path(tempfile.gettempdir()) / f"roofline-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{folder} is not this user's folder; set ROOFLINE_HOME to one that can be written")
    return folder


def threads() -> int | None:
    """The thread count asked for, if any."""
    value = read("ROOFLINE_THREADS")
    return int(value) if value else None
