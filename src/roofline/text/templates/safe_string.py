"""What `|safe` and `|escape` make of a string: Jinja's Markup, to which another string is added escaped.

Chat templates are no HTML, but a template that adds to such a string was trained with what Jinja made of it.
"""

from collections.abc import Callable, Mapping

from roofline.text.templates.tracked_string import Text, joined, literal, text

_NAMES = (("&", "&amp;"), (">", "&gt;"), ("<", "&lt;"), ("'", "&#39;"), ('"', "&#34;"))


def _safely(method: Callable[..., Text]) -> Callable[..., "SafeText"]:
    """A method of `Text` whose result is as safe as the text; strings that it puts in are escaped."""

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


class SafeText(Text):
    """A text in which nothing needs to be escaped; printed it is a text like any other."""

    __slots__ = ()

    def __new__(cls, value: Text) -> "SafeText":
        result = str.__new__(cls, str.__str__(value))
        result.mask = value.mask
        return result

    def __str__(self) -> Text:
        return text(self)

    def __add__(self, other: str) -> "SafeText":
        if not isinstance(other, str):
            raise TypeError(f"a string and a {type(other).__name__} cannot be added")
        return SafeText(joined((self, escape(other))))

    def __radd__(self, other: str) -> "SafeText":
        return SafeText(joined((escape(other), self)))

    __getitem__, __mul__, __rmul__ = map(_safely, (Text.__getitem__, Text.__mul__, Text.__rmul__))  # type: ignore[assignment]
    __mod__, format, join = map(_safely, (Text.__mod__, Text.format, Text.join))  # type: ignore[assignment]
    strip, lstrip, rstrip = map(_safely, (Text.strip, Text.lstrip, Text.rstrip))  # type: ignore[assignment]
    upper, lower, title, capitalize = map(_safely, (Text.upper, Text.lower, Text.title, Text.capitalize))


def text_as_it_is(value: object) -> Text:
    """What a template prints for a value, and a safe text as a safe one."""
    return value if isinstance(value, Text) else text(value)


def escape(value: object) -> SafeText:
    """A value as HTML would have it written; what is safe already stays as it is."""
    if isinstance(value, SafeText):
        return value
    escaped = text(value)
    for sign, name in _NAMES:
        escaped = escaped.replace(sign, literal(name))
    return SafeText(escaped)
