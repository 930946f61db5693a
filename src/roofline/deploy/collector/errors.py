"""Why a scrape came to nothing. It stays within the collector: a replica that cannot be read is a state, no failure."""


class ScrapeError(Exception):
    """A replica's metrics could not be had, or are not usable; the text says why."""


def in_one_line(text: str) -> str:
    """Return a text, in which there may be some of a replica's, without what would begin a line or move a cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)
