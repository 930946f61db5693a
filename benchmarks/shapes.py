"""Ours beside llama.cpp on published shapes: python -m benchmarks.shapes [NAMES] --folder DIR [--library libllama.so].

For each shape one GGUF file with random weights is written, which both read, and the workloads of one sequence of
`roofline bench engine` are run in turns: a prompt of 512 tokens, and 64 tokens decoded behind 8. Rates are medians, the
ratio is that of the medians with the least and the largest of the turns, and the share of the roof is ours. The machine
should have nothing else to do.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.processes import Missing, Worker
from roofline.bench.workloads import WORKLOADS
from roofline.bundle.rewrite import RewriteWork, write_gguf
from roofline.common.json_types import JsonObject
from roofline.models.presets import preset
from roofline.weights.latent_form import latent_config
from roofline.weights.random_weights import pooled_checkpoint

ROWS = ("prefill_512_tok_s", "decode_ctx8_tok_s")
# DeepSeek-V3 is published in one size, of 671 billion parameters.
SMALL_DEEPSEEK: JsonObject = {
    **{"width": 1024, "layers": 12, "heads": 16, "kv_heads": 16, "q_rank": 768, "ffn": 512, "dense_ffn": 4096},
    **{"experts": 32, "experts_per_token": 4, "shared_ffn": 512, "groups": 4, "kept_groups": 2, "dense": [0]},
}
SHAPES: dict[str, tuple[str, JsonObject]] = {
    "qwen3.5-0.8b": ("qwen3.5-0.8b", {}),
    "gemma-4-e2b": ("gemma-4-e2b", {}),
    "lfm2-350m": ("lfm2-350m", {}),
    "granite-4.0-h-350m": ("granite-4.0-h-350m", {}),
    "small-deepseek-v3": ("deepseek-v3", SMALL_DEEPSEEK),
}


def byte_tokenizer() -> JsonObject:
    """Return a tokenizer.json whose tokens are the 256 bytes: prompts here are ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}


def write_shape(name: str, form: str, folder: Path) -> Path:
    """Return a GGUF file of a shape, written if it is not there; form: a kind of `roofline quantize`."""
    out = folder / f"{name}-{form}.gguf"
    if out.exists():
        return out
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    based_on, changes = SHAPES[name]
    config = latent_config({**preset(based_on), **changes}, latent=True)  # as llama.cpp's own converter writes them
    checkpoint = pooled_checkpoint(config, seed=1)
    written = write_gguf(replace(checkpoint, path=folder), out, form, RewriteWork())
    print(f"{name}: {written.nbytes / 2**20:.0f} MiB, {written.bits:.2f} bits a weight", flush=True)
    return out


def compare(file: Path, library: Path | None, turns: int) -> dict[str, object]:
    """Run the rows in turns and return what was measured, by row; prints a line for each."""
    peer = ["benchmarks.llama_cpp", *(["--library", str(library)] if library else [])]
    logs = file.with_suffix(".log")
    commands = {"roofline": ["benchmarks.ours"], "llama.cpp": peer}
    workers = {
        engine: Worker(engine, [sys.executable, "-m", *command, str(file)], logs)
        for engine, command in commands.items()
    }
    record: dict[str, object] = {"file": file.name, "heads": {name: w.start() for name, w in workers.items()}}
    try:
        for row in ROWS:
            answers: dict[str, list[dict[str, object]]] = {name: [] for name in workers}
            for _ in range(turns):
                for name, worker in workers.items():
                    answers[name].append(worker.ask({"workload": row}))
            record[row] = answers
            print(f"{file.stem:<28} {row:<18} {line(row, answers)}", flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    return record


def line(row: str, answers: dict[str, list[dict[str, object]]]) -> str:
    """Return the rates of a row, their ratio, and our share of the roof."""
    tokens = WORKLOADS[row].tokens
    rates = {name: [tokens / float(str(answer["seconds"])) for answer in rows] for name, rows in answers.items()}
    ours, theirs = rates["roofline"], rates["llama.cpp"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    shares = [float(str(answer["share_of_roof"])) for answer in answers["roofline"] if "share_of_roof" in answer]
    share = f"{statistics.median(shares):.0%} of the roof" if shares else "no share"
    middle = statistics.median(ours) / statistics.median(theirs)
    return (
        f"{statistics.median(ours):8.1f} tok/s, llama.cpp {statistics.median(theirs):8.1f}, "
        f"ratio {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {share}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAMES", help=", ".join(SHAPES))
    parser.add_argument("--folder", type=Path, required=True, help="where the files lie or are written")
    parser.add_argument("--library", type=Path, help="libllama.so; usually the one inside the package xllamacpp")
    parser.add_argument("--form", default="Q4_0", help="kind of the files, as of `roofline quantize`")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--record", type=Path, help="a JSON file that gets every turn")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SHAPES):
        parser.error(f"{', '.join(sorted(unknown))}: the shapes are {', '.join(SHAPES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    files = [write_shape(name, options.form, options.folder) for name in options.names or SHAPES]
    records = []
    for file in files:
        try:
            records.append(compare(file, options.library, options.turns))
        except Missing as missing:
            print(f"{file.stem}: {missing}", flush=True)
    if options.record:
        options.record.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
