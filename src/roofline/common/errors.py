"""The errors that a user can meet. Any other exception that escapes is a bug of ours."""

import copyreg
from collections.abc import Sequence


class RooflineError(Exception):
    """Base of all errors that carry a cause and a remedy for the user. Pickling keeps all of their fields."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own calls the class with the message, which is not what those below are made from.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(RooflineError):
    """A file, option or environment variable holds something that cannot be used; the message names it and field."""


class SaidElsewhere(RooflineError):
    """An error that another process of the same run says; this one only ends with it."""


class UnsupportedError(RooflineError):
    """Something valid that this build, chip or model cannot do.

    what: the thing asked for; reason: why it cannot be had; alternatives: what can be used instead.
    """

    def __init__(self, what: str, reason: str, alternatives: Sequence[str] = ()) -> None:
        self.what, self.reason, self.alternatives = what, reason, tuple(alternatives)
        hint = f" Use instead: {', '.join(self.alternatives)}." if self.alternatives else ""
        super().__init__(f"{what} is not supported: {reason}{'' if reason.endswith(('?', '.')) else '.'}{hint}")


class CapacityError(RooflineError):
    """A demand that can never fit.

    what: what was to be placed; needed, available: amounts in `unit`; remedy: the option that would make it fit.
    """

    def __init__(self, what: str, needed: int, available: int, unit: str, remedy: str) -> None:
        self.what, self.needed, self.available, self.unit, self.remedy = what, needed, available, unit, remedy
        super().__init__(f"{what} needs {needed:,} {unit}, {available:,} are available. {remedy}")


class RequestError(RooflineError):
    """A request that is refused; the server maps it to an HTTP status.

    Args:
        status: HTTP status, 4xx or 503.
        code: machine-readable code, e.g. ``"invalid_value"``.
        param: the field of the request at fault.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        self.status, self.code, self.message, self.param = status, code, message, param
        super().__init__(message)


def describe_error(error: BaseException) -> str:
    """One line for a report: the message of an error of ours, the kind and the first line of any other."""
    return str(error) if isinstance(error, RooflineError) else f"{type(error).__name__}: {error}".splitlines()[0]
