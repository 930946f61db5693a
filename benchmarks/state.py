"""Times the kernels of recurrent state alone: python -m benchmarks.state [--isa avx512] [--heads 16] [--tokens 1,64].

Processor time of one thread, the least over several rounds, a token and layer: the gated delta rule of so many value
heads of 128 x 128 with a key head each, and the convolution of its channels over four tokens. A slot's state is read
and written once a call, as a step does; `cold` goes round so many slots that they lie in memory. The
binding copies the inputs of one head, which all share, and makes its scratch: some 20 microseconds a call.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from roofline import _native

DIM, TAPS = 128, 4
COLD_BYTES = 256 << 20


def least_seconds(work: Callable[[int], None], rounds: int) -> float:
    """Seconds of processor time of the fastest round; work(number of the round)."""
    times = []
    for number in range(rounds + 1):
        begin = time.thread_time()
        work(number)
        times.append(time.thread_time() - begin)
    return min(times[1:])


def delta_seconds(isa: str, heads: int, tokens: int, slots: int, rounds: int) -> float:
    """Of one call of all heads, on another slot each round."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((tokens, DIM)).astype(np.float32) for _ in range(3))
    a, b = (random.standard_normal(tokens).astype(np.float32) for _ in range(2))
    states = np.zeros((slots, heads, DIM, DIM), np.float32)
    y, none = np.empty((tokens, DIM), np.float32), np.zeros(0, np.float32)

    def work(number: int) -> None:
        state = states[number % slots]
        _native.kernels.delta_rule(isa, q, k, v, a, b, 0.5, -1.0, 1e-6, state, state, none, 0, y)

    return least_seconds(work, rounds)


def conv_seconds(isa: str, channels: int, tokens: int, rounds: int) -> float:
    """Of one call of all channels."""
    random = np.random.default_rng(0)
    x = random.standard_normal((tokens, channels)).astype(np.float32)
    weight = random.standard_normal((TAPS, channels)).astype(np.float32)
    before, y, none = weight[1:].copy(), np.empty_like(x), np.zeros(0, np.float32)
    return least_seconds(lambda _: _native.kernels.causal_conv(isa, x, weight, none, before, True, y, channels), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=_native.isas()[0], choices=_native.isas())
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", default="1,8,64,512,2048")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    cold = max(2, COLD_BYTES // (options.heads * DIM * DIM * 4))
    print(f"{options.isa}, {options.heads} heads of {DIM} x {DIM}; microseconds a token and layer")
    print(f"{'tokens':>8} {'delta_rule':>12} {'cold':>8} {'causal_conv':>12}")
    for tokens in map(int, options.tokens.split(",")):
        warm, far = (delta_seconds(options.isa, options.heads, tokens, slots, options.rounds) for slots in (1, cold))
        conv = conv_seconds(options.isa, 3 * options.heads * DIM, tokens, options.rounds)
        print(f"{tokens:>8} " + " ".join(f"{s / tokens * 1e6:>{w}.1f}" for s, w in ((warm, 12), (far, 8), (conv, 12))))


if __name__ == "__main__":
    main()
