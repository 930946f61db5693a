"""Files that are read again when they change."""

from pathlib import Path


class WatchedFiles:
    """Notices, when asked, that one of some files is another one than when it was asked last."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._stamps()

    def changed(self) -> bool:
        """Whether a file was written, replaced, removed or put there since. Costs a system call a file."""
        before, self._seen = self._seen, self._stamps()
        return self._seen != before

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
