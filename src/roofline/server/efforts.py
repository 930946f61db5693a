"""What a chat template is told of how much the model is to think: the variables that it reads, in its own words."""

import re

# What clients call degrees of thinking, and what chat templates do, of which most know three.
EFFORTS = {
    **{"none": "", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"},
}
_OFF = ("none", "no_think")
_ORDER = ("minimal", "low", "medium", "high", "xhigh", "max")
_COMPARED = re.compile(
    r"reasoning_effort\b[^%{}]{0,40}?(?:==|\bin\b)\s*(\[[^\]]{0,200}\]|'[^']{0,40}'|\"[^\"]{0,40}\")"
)
_WORD = re.compile(r"['\"]([a-z_]+)['\"]")
_THINKING = re.compile(
    r"\{%-?\s*(?:el)?if (?:not )?thinking\s+(?:%|-%|and|or)|(?<![.\w'\"])thinking is (?:not )?defined"
)


def thinking_switch(template: str) -> str | None:
    """Return the variable by which a chat template turns thinking on and off; None: it has none."""
    if "enable_thinking" in template:
        return "enable_thinking"
    return "thinking" if _THINKING.search(template) else None


def effort_words(template: str) -> tuple[frozenset[str], bool]:
    """Return the words that a chat template compares `reasoning_effort` with, and whether it takes no others."""
    compared = [match[1] for match in _COMPARED.finditer(template)]
    words = frozenset(word for text in compared for word in _WORD.findall(text))
    return words, "not in [" in " ".join(re.findall(r"reasoning_effort\s+not\s+in\s*\[", template))


def template_effort(template: str, effort: str) -> str | None:
    """Return what a chat template's `reasoning_effort` is for a word of EFFORTS; None: it is told nothing.

    The word itself where the template compares with it, else one of low, medium and high; of a template that takes no
    other words than it lists, the nearest of those.
    """
    if "reasoning_effort" not in template:
        return None
    words, only = effort_words(template)
    if effort in words:
        return effort
    if effort == "none":
        return next((word for word in _OFF if word in words), None)
    degree, known = EFFORTS[effort], [word for word in _ORDER if word in words]
    if not only or degree in words or not known:
        return degree
    return min(known, key=lambda word: abs(_ORDER.index(word) - _ORDER.index(degree)))
