"""Integers of any size between two bounds, as a regular expression over their digits."""

DIGIT = "[0-9]"


def integers(least: int | None, most: int | None) -> str:
    """A regular expression of the integers from `least` to `most`, as JSON writes them; None: no bound.

    Raises ValueError where there are none.
    """
    if least is not None and most is not None and least > most:
        raise ValueError("there are no integers between the bounds")
    parts: list[str] = []
    if least is None or least < 0:  # "-" and the digits of its opposite, in reverse order
        nearest = 1 if most is None or most >= 0 else -most
        parts.append(f"-(?:{_naturals(nearest, None if least is None else -least)})")
    if most is None or most >= 0:
        parts.append(_naturals(max(least or 0, 0), most))
    return f"(?:{'|'.join(parts)})"


def _naturals(least: int, most: int | None) -> str:
    """Of integers that are 0 or more."""
    if most is None:
        length = len(str(least))
        return f"{_naturals(least, 10**length - 1)}|[1-9]{DIGIT}{{{length},}}"
    parts: list[str] = []
    while len(str(least)) < len(str(most)):
        last = 10 ** len(str(least)) - 1
        parts.append(_between(str(least), str(last)))
        least = last + 1
    return "|".join([*parts, _between(str(least), str(most))])


def _between(low: str, high: str) -> str:
    """Of texts of digits of one length, from one to another."""
    if low == high:
        return low
    count = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return _class(low[0], high[0]) + (f"{DIGIT}{{{count}}}" if count else "")
    if low[0] == high[0]:
        return f"{low[0]}(?:{_between(low[1:], high[1:])})"
    parts: list[str] = []
    first, last = int(low[0]), int(high[0])
    if not set(low[1:]) <= {"0"}:
        parts.append(f"{first}(?:{_between(low[1:], '9' * count)})")
        first += 1
    end = ""
    if not set(high[1:]) <= {"9"}:
        end = f"{last}(?:{_between('0' * count, high[1:])})"
        last -= 1
    if first <= last:
        parts.append(f"{_class(str(first), str(last))}{DIGIT}{{{count}}}")
    return "|".join([*parts, end] if end else parts)


def _class(first: str, last: str) -> str:
    return first if first == last else f"[{first}-{last}]"
