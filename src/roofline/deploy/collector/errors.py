"""Why a scrape came to nothing. It stays within the collector: a replica that cannot be read is a state, no failure."""


class ScrapeError(Exception):
    """A replica's metrics could not be had, or are not usable; the text says why."""
