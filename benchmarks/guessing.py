"""What a guessed step costs beside a plain one, with a model's own layer that guesses: `python -m benchmarks.guessing`.

Random weights cannot show how often such a layer is right, so two models are made in which it always is, and never: the
layers of both add nothing to an id's row, and the layer that guesses has that row as it is, or turned round. What a
step computes is the same for all weights, so the two rates are the ends between which a trained model lies.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from roofline.backends.options import LoadOptions
from roofline.bench.speculation import compare
from roofline.bundle import load
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.models.mixes import formats_of
from roofline.ops import formats
from roofline.weights import names
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.files.mapped import TensorInfo
from roofline.weights.random_weights import POOL, random_values

# Qwen3.5-0.8B, as published.
SHAPE: dict[str, Any] = {
    **{"family": "qwen3_5", "width": 1024, "layers": 24, "heads": 8, "kv_heads": 2, "head_dim": 256, "ffn": 3584},
    **{"vocab": 248_320, "max_position": 262_144, "norm_eps": 1e-6, "rope_theta": 1e7, "rope_scaling": None},
    **{"rope_style": "half", "rotary_dim": 64, "tied": True, "attention_bias": False, "qk_norm": True},
    **{"sliding_window": None, "recurrent": [(layer + 1) % 4 != 0 for layer in range(24)]},
    **{"key_heads": 16, "value_heads": 16, "key_dim": 128, "value_dim": 128, "taps": 4},
}
ADDS = (".attn.o.weight", ".linear.o.weight", ".mlp.down.weight")  # what layers add to a row is made by


def model_of(shape: dict[str, Any], form: str, sign: float) -> Checkpoint:
    """A model whose next id follows from the last one, and a layer that guesses it (sign 1) or anything else (-1)."""
    shapes, guessing = names.parameter_shapes(shape), names.guessing_shapes(shape)
    kinds = formats_of(form, shapes | guessing)
    infos = {
        name: TensorInfo(name, kinds[name], size, formats.get(kinds[name]).nbytes(size))
        for name, size in (shapes | guessing).items()
    }
    pools: dict[tuple[int, str], np.ndarray] = {}

    def read(name: str) -> np.ndarray:
        info = infos[name]
        kind = formats.get(info.format)
        if name.endswith("mtp.fc.weight"):
            width = info.shape[0]
            return kind.quantize(np.concatenate([sign * np.eye(width), np.zeros((width, width))], 1).astype(np.float32))
        if len(info.shape) < 2 or info.shape[1] < 32 or name.endswith(ADDS):
            return kind.quantize(random_values(name, info.shape, 1) * np.float32(not name.endswith(ADDS)))
        columns = info.shape[1]
        key = columns, info.format
        if key not in pools:
            pools[key] = kind.quantize(random_values(f"pool.{columns}", (POOL // columns, columns), 1))
        return np.resize(pools[key], info.nbytes)

    return Checkpoint(
        path=Path(f"random:{int(sign)}"),
        kind="random",
        tensors={name: infos[name] for name in shapes},
        metadata={},
        config=shape,
        bytes_of=read,
        guessing={name: infos[name] for name in guessing},
    )


def measure(shape: dict[str, Any], form: str, sign: float, counts: list[int], prompt: int, answer: int) -> None:
    """Print a row for each length of guesses."""
    options = LoadOptions(cache_tokens=4096, max_running=8, draft_tokens=max(counts), guesses=True)
    executable = load(model_of(shape, form, sign), options, text=False).executable
    plain = LocalEngine(executable, EngineConfig(prefix_cache=False))
    ids = [(7 * i) % 1000 for i in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    config = EngineConfig(prefix_cache=False, speculate="mtp", speculate_always=True)
    for count in counts:
        guessing = LocalEngine(executable, replace(config, speculate_tokens=count))
        row = compare(plain, guessing, ids, params, ())
        rates = f"{max(row['tok_s']):7.1f} tok/s, without {max(row['without_tok_s']):7.1f}, ratio {row['ratio']:.2f}"
        print(f"up to {count} tokens, {row['acceptance']:4.0%} right: {rates}, {row['tokens_per_step']:.2f} a step")
    executable.close()


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", default="Q4_0", help="kind of the weights, as of `roofline quantize`")
    parser.add_argument("--tokens", default="1,2,3,4", help="lengths of guesses")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=200)
    parser.add_argument("--layers", type=int, default=SHAPE["layers"], help="of the model; fewer to try the program")
    chosen = parser.parse_args()
    shape = SHAPE | {"layers": chosen.layers, "recurrent": SHAPE["recurrent"][: chosen.layers]}
    for sign in (1.0, -1.0):
        counts = [int(count) for count in chosen.tokens.split(",")]
        measure(shape, chosen.form, sign, counts, chosen.prompt, chosen.answer)


if __name__ == "__main__":
    main()
