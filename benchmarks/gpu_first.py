"""The first minutes on a GPU: one load a form, a row a measurement, a line of JSON the moment it is known.

    python -m benchmarks.gpu_first OUT.jsonl PART[:SECONDS] ...
    python benchmarks/gpu_first.py --reference        (before, on a CPU: what the part `whole` compares with)

Parts: device, whole, kernels, torch, bf16, q4, q4k, serve, exact, hf, train. Each in a process of its own, killed after
its seconds. Rows that exist stay; a part that dies leaves its rows and a row that says so.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRESET = os.environ.get("FIRST_PRESET", "llama-2-7b")
BEGAN = time.monotonic()
LOST = 77  # status of a process whose device does not answer any more
DECODES = ((1, 8), (16, 8), (64, 8), (1, 2048), (16, 960), (64, 240))  # sequences, tokens in the cache
PROMPTS = ((1, 32), (1, 128), (1, 512), (1, 2048), (8, 2048))  # prompts, tokens of each
PROFILES = ((1, 1024, 1), (1, 240, 64), (2048, 0, 1))  # new tokens, tokens in the cache, sequences
SERVED = (64, 256)


def main(words: list[str]) -> int:
    out = Path(words[0]).resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    for word in words[1:]:
        part, _, limit = word.partition(":")
        began, why, dead = time.monotonic(), "", 1
        while dead:  # a process that lost its device: the next one goes on behind the case that cost it
            left = float(limit) - (time.monotonic() - began) if limit else None
            command = [sys.executable, __file__, "--part", str(out), part]
            with subprocess.Popen(command, cwd=ROOT, env={**env, "FIRST_FROM": str(rows_of(out, part))}) as child:
                try:
                    status = child.wait(left)
                except subprocess.TimeoutExpired:
                    child.kill()
                    status, why = 0, f"cut off after {limit} s"
            dead = status == LOST
            why = why or (f"status {status}" if status else "")
        put(out, part, "part ended", seconds=round(time.monotonic() - began, 1), why=why)
        print(f"{part}: {time.monotonic() - began:.0f} s {why}", flush=True)
    return 0


def rows_of(out: Path, part: str) -> int:
    """How many rows of a part there are."""
    lines = out.read_text().splitlines() if out.exists() else []
    return sum(json.loads(line)["part"] == part for line in lines)


def put(out: Path, part: str, row: str, **figures: Any) -> None:
    """A line at once."""
    line = json.dumps({"t": round(time.monotonic() - BEGAN, 1), "part": part, "row": row, **figures}, default=str)
    with out.open("a") as file:
        file.write(line + "\n")
    print(line[:400], flush=True)


class Row:
    """row(name, function): what the function gives, or its error, as a line."""

    def __init__(self, out: Path, part: str) -> None:
        self.out, self.part = out, part

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            made = compute()
            figures = made if isinstance(made, dict) else {"value": made}
        except Exception as error:
            traceback.print_exc()
            made, figures = None, {"failed": f"{type(error).__name__}: {error}"[:500]}
        put(self.out, self.part, name, s=round(time.perf_counter() - began, 2), **figures)
        if self.part == "kernels" and "CUDA error" in figures.get("failed", ""):
            os._exit(LOST)
        return made


# ---- parts ---------------------------------------------------------------------------------------------------------


def device(row: Row) -> None:
    import torch

    def about() -> dict[str, Any]:
        import numpy
        import triton

        from roofline.backends.gpu.devices import find

        found = find()
        return {
            "device": found.device.title,
            "chip": found.chip.name,
            "free": found.free,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "numpy": numpy.__version__,
            "cores": os.cpu_count(),
            "cudnn": torch.backends.cudnn.version(),
            "capability": torch.cuda.get_device_capability(),
        }

    row("about", about)

    def roofs() -> dict[str, Any]:
        from roofline.backends.gpu.measure.roofs import measure_roofs

        return measure_roofs().record()

    for _ in range(2):
        row("roofs", roofs)

    def pdl() -> float:  # the gap between dependent empty launches in a graph
        x = torch.zeros(1, device="cuda")
        for _ in range(3):
            x.add_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                x.add_(1)
        graph.replay()
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3  # us a launch

    row("us of a small launch in a graph", pdl)


FORMS = ("BF16", "Q4_0", "Q4_K", "Q8_0")
REFERENCE = ROOT / ".ref" / "logits.npz"  # written here, on a CPU, by `--reference`; carried


def small_logits(backend: str, form: str) -> list[Any]:
    """The last logits of a prompt of 150 tokens (beyond WIDEN), of decoding steps, and of a mixed step."""
    import numpy as np

    from roofline import bundle
    from roofline.models.presets import preset
    from roofline.ops.batch import Segment
    from roofline.weights.random_weights import random_checkpoint

    small = {**preset("llama-3.2-1b"), "layers": 2, "width": 512, "heads": 8, "kv_heads": 2, "ffn": 1024, "vocab": 2000}
    ids = np.random.default_rng(0).integers(0, 2000, 200).tolist()
    pages, other = list(range(20)), list(range(24, 30))
    steps = [
        [Segment(ids[:150], 0, pages)],
        *([Segment(ids[i : i + 1], i, pages)] for i in range(150, 155)),
        [Segment(ids[155:156], 155, pages), Segment(ids[:30], 0, other)],
    ]
    model = bundle.load(
        random_checkpoint(small, 3, form),
        backend=backend,
        text=False,
        max_model_len=256,
        cache_tokens=512,
        max_running=4,
        max_batch_tokens=256,
    )
    got = []
    try:
        for segments in steps:
            ends = np.cumsum([len(each.ids) for each in segments]) - 1
            model.executable.batch.fill(segments, ends.tolist())
            model.executable.forward()
            got.append(np.array(model.executable.logits()))
    finally:
        model.executable.close()
    return got


def reference() -> None:
    import numpy as np

    REFERENCE.parent.mkdir(exist_ok=True)
    np.savez(
        REFERENCE, **{f"{form}{i}": each for form in FORMS for i, each in enumerate(small_logits("reference", form))}
    )


def whole(row: Row) -> None:
    """A small model's logits beside the reference backend's: everything but the sizes of a 7B."""
    import numpy as np

    with np.load(REFERENCE) as held:
        for form in FORMS:

            def compare(form: str = form) -> dict[str, Any]:
                got = small_logits("gpu", form)
                want = [held[f"{form}{i}"] for i in range(len(got))]
                far = [float(np.linalg.norm(g - w) / np.linalg.norm(w)) for g, w in zip(got, want, strict=True)]
                return {"prompt": far[0], "decodes": far[1:-1], "mixed": far[-1], "ok": bool(max(far) < 6e-2)}

            row(f"logits beside the reference, {form}", compare)


def kernels(row: Row) -> None:
    """Every case: its error first, then its time."""
    import torch
    from triton.testing import do_bench

    from benchmarks.gpu_kernels import Bench, Shapes
    from benchmarks.gpu_kernels_case import error, errors
    from roofline.backends.gpu.ahead import kernel_cache
    from roofline.backends.gpu.devices import find
    from roofline.backends.gpu.measure.roofs import measure_roofs

    kernel_cache.use()
    limit = measure_roofs(sides=(8192,))
    for number, make in enumerate(Bench(find().chip, "cuda", Shapes(), seed=1).cases()):
        if number < int(os.environ.get("FIRST_FROM", "0")):
            continue

        def one(make: Callable[[], Any] = make) -> dict[str, Any]:
            began = time.perf_counter()
            case = make()
            made, found = time.perf_counter() - began, error(case)
            ms = do_bench(case.run, warmup=10, rep=30, return_mode="median")
            least = max(case.flops / limit.flops, case.nbytes / limit.bytes_per_s)
            wrong = {} if found <= case.tolerance else {"errors": errors(case)}
            return {
                "case": case.name,
                "error": found,
                "ok": bool(found <= case.tolerance),
                "ms": ms,
                "share": least * 1e3 / ms,
                "make_s": round(made, 2),
                **wrong,
            }

        row(getattr(make, "__name__", "?"), one)
        torch.cuda.empty_cache()


def torch_side(row: Row) -> None:
    """cuBLAS and torch's attention at the shapes of `kernels`."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    from triton.testing import do_bench

    for m in (1, 16, 64, 256, 2048):
        for n, k in ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096)):

            def mm(m: int = m, n: int = n, k: int = k) -> dict[str, float]:
                sets = [
                    (
                        torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
                        torch.randn(n, k, device="cuda", dtype=torch.bfloat16),
                    )
                    for _ in range(1 if m > 64 else 3)
                ]
                ms = do_bench(
                    lambda: [torch.mm(x, w.t()) for x, w in sets], warmup=10, rep=40, return_mode="median"
                ) / len(sets)
                return {"ms": ms, "tb_s": 2 * (n * k + m * (n + k)) / ms / 1e9, "tflops": 2 * m * n * k / ms / 1e9}

            row(f"mm {m} x {n} x {k}", mm)
    query, key, value = (torch.randn(1, 32, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):

        def attention(name: str = name) -> dict[str, float]:
            with sdpa_kernel([getattr(SDPBackend, name)]):
                ms = do_bench(lambda: sdpa(query, key, value, is_causal=True), warmup=10, rep=40, return_mode="median")
            return {"ms": ms, "tflops": 2 * 2048 * 2048 * 128 * 32 / ms / 1e9}

        row(f"prompt 2048, {name}", attention)


def model(row: Row, form: str, exact: bool = False, serve: bool = False) -> None:
    """All that one load gives: decoding, prompts, ops beside their roofs, serving, exactness."""
    from benchmarks import gpu_parts
    from benchmarks.gpu_parts import Given, decode, differences, loaded, requests
    from roofline.bench.engine import Bench
    from roofline.bench.profile import profile

    given = Given(PRESET, None, (1, 16, 64), None, lambda rows: None)
    lengths = [tuple(each) for each in json.loads(gpu_parts.TYPICAL.read_text())["lengths"]]
    pages = sum(-(-(p + a + 1) // 16) for p, a in lengths)
    copy = row("copy", gpu_parts.copied) or 1.0
    began = time.perf_counter()
    with loaded(
        given, form, tokens=16 * max(pages, 2400), running=256 if serve else 64, length=2304, exact=exact
    ) as held:
        put(row.out, row.part, "loaded", s=round(time.perf_counter() - began, 1), **held.notes)
        ex = held.executable
        for batch, context in DECODES:
            row(f"decode {batch} after {context}", partial(decode, held, batch, context, copy, steps=48))
        bench = Bench(ex, ex.limits.tokens)
        for count, prompt in PROMPTS:
            for captured in (False, True):  # in graphs or not

                def prefill(count: int = count, prompt: int = prompt, captured: bool = captured) -> dict[str, Any]:
                    ex.captures = captured
                    for _ in range(3):
                        bench.generate(count, prompt, 1)
                    return {
                        "ms": sorted(bench.generate(count, prompt, 1).seconds * 1e3 for _ in range(4)),
                        "tok": count * prompt,
                    }

                row(f"prompt {count} x {prompt}{', graphs' if captured else ''}", prefill)
        if exact:
            row("bits", lambda: differences(ex, prompts=24))
            return
        for step in (profile.ProfiledStep(*each) for each in PROFILES):

            def ops(step: Any = step) -> dict[str, Any]:
                found = profile.profile_step(ex, step, budget=0.4)
                return {
                    "step_ms": found.step_seconds * 1e3,
                    "share": found.share,
                    "unexplained_ms": found.unexplained_seconds * 1e3,
                    "ops": [
                        [op.section, op.op, op.shape, op.calls, round(op.seconds * 1e6, 1), round(op.share, 3)]
                        for op in found.ops
                    ],
                }

            row(f"ops of {step.name}", ops)
        for count in SERVED if serve else ():
            for overlap in (True, True, True, False):

                def served(count: int = count, overlap: bool = overlap) -> dict[str, Any]:
                    seconds = requests(ex, lengths[:count], overlap)
                    return {
                        "seconds": seconds,
                        "out_tok_s": sum(a for _, a in lengths[:count]) / seconds,
                        "all_tok_s": sum(p + a for p, a in lengths[:count]) / seconds,
                        "graphs": ex.graphs_captured(),
                    }

                row(f"serve {count}, overlap {overlap}", served)


def hf(row: Row) -> None:
    """transformers: flash, and the static cache under torch.compile (gpt-fast's way) at batch 1."""
    from roofline.bench.peers.transformers_model import TransformersRunner, random_model
    from roofline.models.presets import preset
    from roofline.weights.to_hf import hf_config

    def prompts(runner: TransformersRunner, batch: int) -> dict[str, Any]:
        return {"seconds": [runner.prefill(batch, 2048) for _ in range(3)]}

    def decodes(runner: TransformersRunner, batch: int) -> dict[str, Any]:
        return {"s_per_step": [runner.decode(batch, 8, 48) / 48 for _ in range(3)]}

    built = random_model(hf_config(preset(PRESET)), "cuda")
    for name, techniques, batches in (("flash", {"flash"}, (1, 16)), ("static", {"compile", "static"}, (1,))):
        runner = TransformersRunner(built, frozenset(techniques))
        for batch in batches:
            if name == "flash":
                row(f"{name} prompt {batch} x 2048", partial(prompts, runner, batch))
            row(f"{name} decode {batch}", partial(decodes, runner, batch))


def train(row: Row) -> None:
    from roofline.bench.train import bench_train

    for name, changes in (
        ("1b compiled", ["compile_config={}", "device_train_microbatch_size=4"]),
        (
            "1b compiled, selective",
            ["compile_config={}", "device_train_microbatch_size=8", "fsdp_config.activation_checkpointing=selective"],
        ),
    ):

        def one(changes: list[str] = changes) -> dict[str, Any]:
            card = bench_train("llama-3.2-1b", changes, steps=6, warmup=3)["card"]
            return {"speed": card["speed"], "flops": card["flops"], "memory": card["memory"], "peak": card["peak"]}

        row(name, one)


PARTS: dict[str, Callable[[Row], None]] = {
    "device": device,
    "whole": whole,
    "kernels": kernels,
    "torch": torch_side,
    "bf16": lambda row: model(row, "BF16", serve=True),
    "q4": lambda row: model(row, "Q4_0", serve=True),
    "q4k": lambda row: model(row, "Q4_K"),
    "exact": lambda row: model(row, "BF16", exact=True),
    "hf": hf,
    "train": train,
}

if __name__ == "__main__":
    if sys.argv[1] == "--reference":
        reference()
    elif sys.argv[1] == "--part":
        PARTS[sys.argv[3]](Row(Path(sys.argv[2]), sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1:]))
