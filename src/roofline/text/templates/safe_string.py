"""What `|safe` and `|escape` make of a string: Jinja's Markup, to which another string is added escaped.

Chat templates are no HTML, but a template that adds to such a string was trained with what Jinja made of it.
"""

from collections.abc import Callable, Mapping

from roofline.text.templates.tracked_string import TrackedText, joined, literal, text

_NAMES = (("&", "&amp;"), (">", "&gt;"), ("<", "&lt;"), ("'", "&#39;"), ('"', "&#34;"))


def _safely(method: Callable[..., TrackedText]) -> Callable[..., "SafeText"]:
    """A method of `TrackedText` whose result is as safe as the text; strings that it puts in are escaped."""

    def run(value: "SafeText", *args: object, **kwargs: object) -> "SafeText":
        keywords = {name: _escaped(arg) for name, arg in kwargs.items()}
        return SafeText(method(value, *map(_escaped, args), **keywords))

    return run


def _escaped(value: object) -> object:
    """A value for a method: its strings escaped."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, tuple):
        return tuple(map(_escaped, value))
    if isinstance(value, list):
        return list(map(_escaped, value))
    return {key: _escaped(item) for key, item in value.items()} if isinstance(value, Mapping) else value


class SafeText(TrackedText):
    """A text in which nothing needs to be escaped; printed it is a text like any other."""

    __slots__ = ()

    def __new__(cls, value: TrackedText) -> "SafeText":
        result = str.__new__(cls, str.__str__(value))
        result.mask = value.mask
        return result

    def __str__(self) -> TrackedText:
        return text(self)

    def __add__(self, other: str) -> "SafeText":
        if not isinstance(other, str):
            raise TypeError(f"a string and a {type(other).__name__} cannot be added")
        return SafeText(joined((self, escape(other))))

    def __radd__(self, other: str) -> "SafeText":
        return SafeText(joined((escape(other), self)))

    __getitem__, __mul__, __rmul__ = map(_safely, (TrackedText.__getitem__, TrackedText.__mul__, TrackedText.__rmul__))  # type: ignore[assignment]
    __mod__, format, join = map(_safely, (TrackedText.__mod__, TrackedText.format, TrackedText.join))  # type: ignore[assignment]
    strip, lstrip, rstrip = map(_safely, (TrackedText.strip, TrackedText.lstrip, TrackedText.rstrip))  # type: ignore[assignment]
    upper, lower, title, capitalize = map(
        _safely, (TrackedText.upper, TrackedText.lower, TrackedText.title, TrackedText.capitalize)
    )


def text_as_it_is(value: object) -> TrackedText:
    """What a template prints for a value, and a safe text as a safe one."""
    return value if isinstance(value, TrackedText) else text(value)


def escape(value: object) -> SafeText:
    """A value as HTML would have it written; what is safe already stays as it is."""
    if isinstance(value, SafeText):
        return value
    escaped = text(value)
    for sign, name in _NAMES:
        escaped = escaped.replace(sign, literal(name))
    return SafeText(escaped)
