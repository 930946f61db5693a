"""What engines are timed on: fixed shapes over pseudo-random ids, the same for every engine."""

from collections.abc import Sequence

PREFILL = (128, 512, 2000)  # prompt tokens
DECODE = ((8, 64), (1024, 64))  # tokens before, tokens made
SERVE = ((1, 128, 64), (8, 128, 64), (64, 128, 64), (32, 700, 40))  # requests at once, prompt and answer of each
WARM_UP = 32
MODULUS = 2**31


def token_ids(count: int, seed: int = 0, vocab: int = 30000) -> list[int]:
    """`count` ids in [5, vocab), from a linear congruential generator, so that any program can make the same."""
    ids: list[int] = []
    state = seed * 7919 + 12345
    while len(ids) < count:
        state = (state * 1103515245 + 12345) % MODULUS
        ids.append(5 + state % (vocab - 5))
    return ids


def row_names() -> list[str]:
    """The keys of all rows, in the order they run."""
    return [
        *(prefill_name(n) for n in PREFILL),
        *(decode_name(n) for n, _ in DECODE),
        *(serve_name(*shape) for shape in SERVE),
    ]


def prefill_name(n: int) -> str:
    return f"prefill_{n}_tok_s"


def decode_name(n: int) -> str:
    return f"decode_ctx{n}_tok_s"


def serve_name(n: int, prompt: int, answer: int) -> str:
    return f"serve_{n}x{prompt}+{answer}_out_tok_s"


def tokens_of(row: str) -> int:
    """Tokens that a row's rate counts: prompt tokens of prefill, generated tokens of the others."""
    return _shapes()[row][0]


def tokens_held(row: str) -> int:
    """Tokens in the cache halfway through a row: with the weights, what its steps read again and again."""
    return _shapes()[row][1]


def _shapes() -> dict[str, tuple[int, int]]:
    return {
        **{prefill_name(n): (n, n // 2) for n in PREFILL},
        **{decode_name(n): (k, n + k // 2) for n, k in DECODE},
        **{serve_name(n, i, o): (n * o, n * (i + o // 2)) for n, i, o in SERVE},
    }


def chosen(rows: Sequence[str] | None, serve: bool) -> list[str]:
    """The rows to run: those whose key contains one of `rows` (None: all), without the serve rows unless `serve`."""
    names = [name for name in row_names() if serve or not name.startswith("serve_")]
    return [name for name in names if rows is None or any(part in name for part in rows)]
