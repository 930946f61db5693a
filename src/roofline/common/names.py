"""Messages for a name that a registry does not have."""

from collections.abc import Iterable


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'linear'?"``, or nothing where no name among the choices is near."""
    from difflib import get_close_matches  # only for an error: it takes milliseconds to import

    names = list(choices)
    near = [longer for longer in names if len(name) > 2 and longer.startswith(name)] or get_close_matches(
        name, names, n=1
    )
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """The message for a name that a registry does not have: the nearest one, and all of them."""
    names = sorted(choices)
    return f"there is no {kind} {name!r}{did_you_mean(name, names)} (known: {', '.join(names)})"
