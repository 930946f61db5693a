"""What commands that score texts share: reading a text, and the table of scores."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.cli.output import console, plain_table, print_table
from roofline.common.errors import ConfigError

if TYPE_CHECKING:
    from roofline.bench.quality.score import Score

MAX_TEXT = 1 << 28  # bytes


def read_text(path: Path) -> str:
    """A text file. Raises ConfigError where it cannot be read, is not UTF-8 or is empty."""
    from roofline.common.files import read_regular

    try:
        text = read_regular(path, MAX_TEXT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise ConfigError(f"{path}: is empty: give a text of a few thousand words")
    return text


def print_scores(heading: str, names: Sequence[str], scores: "Sequence[Score]") -> None:
    """A table of scores, compared with the first."""
    rows = []
    for name, score in zip(names, scores, strict=True):
        compared = ["-"] * 3
        if score.kl is not None and score.kl_99 is not None and score.agreement is not None:
            compared = [f"{score.kl:.5f}", f"{score.kl_99:.4f}", f"{score.agreement:.2%}"]
        error = score.perplexity * score.error
        rows.append([name, f"{score.perplexity:.4f}", f"{error:.3f}", *compared, f"{score.tokens_per_second:.0f}"])
    print_table(console(), plain_table((heading, "perplexity", "+-", "KL", "KL 99%", "same top", "tok/s"), rows))
