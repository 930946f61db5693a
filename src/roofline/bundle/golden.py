"""What a slow reference says of golden prompts: float32 in torch, with the weights from the original file's bytes.

`python -m roofline.bundle.golden` reads a GoldenTask from its standard input and writes logits, or why there are none.
It is a process of its own so that its memory goes back to the system, and the least important one of the machine.
"""

import asyncio
import hashlib
import io
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roofline.common import env, files
from roofline.common.errors import RooflineError, UnsupportedError

if TYPE_CHECKING:
    from roofline.weights.checkpoint import Checkpoint

FORMAT = 1  # of the files that are kept; raised where the reference says something else
MOST_WEIGHTS = 2 << 30  # the reference holds each in four bytes: 8 GiB
KEPT = 8  # references on disk, each of some MB
SECONDS = 1800.0  # that the reference may take
UNSUPPORTED = 3  # the exit status of a reference that there is not for this model
NO_TORCH = "torch, which computes the reference, is not installed (pip install torch)"


@dataclass(frozen=True)
class GoldenTask:
    """source: a file or folder of weights, or a preset; weights: as the option of this name; prompts: ids; rows: of
    each prompt, the positions whose logits are wanted."""

    source: str
    weights: str | None
    prompts: list[list[int]]
    rows: list[list[int]]


def original(source: str) -> str:
    """Where the original weights of a model are, by name or path: of a bundle, what it was compiled from. Raises
    ConfigError, and UnsupportedError where a bundle's source is gone."""
    from roofline.bundle import manifest, origins
    from roofline.bundle.reader import is_bundle
    from roofline.weights import sources

    if source.startswith("preset:"):
        return source
    path = Path(source)
    if not is_bundle(path):
        path = sources.resolve(source)
        if not is_bundle(path):
            return str(path)
    bundle_id = manifest.read(path).id
    if (file := origins.source_of(bundle_id)) is not None:
        return file
    missing = [origin.path for origin in origins.origins(bundle_id)]
    where = f"what it was compiled from, {missing[0]}, is not here" if missing else "it was compiled elsewhere"
    raise UnsupportedError("golden prompts for this bundle", where, ["the name or path of the model's files"])


async def reference_logits(task: GoldenTask) -> np.ndarray:
    """float32 [rows of all prompts, vocabulary]; kept in ROOFLINE_HOME/golden, so that it is computed once for a file.

    Raises UnsupportedError, with the reason, where there is no reference: torch is missing, or the model is too large;
    RooflineError where it fails.
    """
    stored = await asyncio.to_thread(_file, task)
    rows = sum(map(len, task.rows))
    if (logits := await asyncio.to_thread(_read, stored, rows)) is not None:
        return logits
    data = await _computed(task)
    logits = _parse(data, rows)
    if logits is None:
        raise RooflineError("the reference wrote no logits")
    await asyncio.to_thread(_keep, stored, data)
    return logits


async def _computed(task: GoldenTask) -> bytes:
    if find_spec("torch") is None:
        raise UnsupportedError("golden prompts", NO_TORCH)
    command = [sys.executable, "-m", "roofline.bundle.golden"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(SECONDS):
            data, problem = await process.communicate(json.dumps(asdict(task)).encode())
    except TimeoutError as error:
        raise RooflineError(f"the reference took longer than {SECONDS:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = problem.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit status {process.returncode}"
        if process.returncode == UNSUPPORTED:
            raise UnsupportedError("golden prompts", reason)
        raise RooflineError(f"the reference failed: {reason}")
    return data


def forget_packed(source: str) -> None:
    """Have the weights of a file or folder packed anew by the next load, where they are kept packed."""
    from roofline.bundle import bundle_cache

    if not source.startswith("preset:") and bundle_cache.enabled():
        bundle_cache.forget(Path(source))


def logits_of(task: GoldenTask) -> np.ndarray:
    """As `reference_logits`, computed here and now."""
    from roofline.backends.options import LoadOptions
    from roofline.bundle.loader import load
    from roofline.bundle.sources import open_checkpoint
    from roofline.ops.batch import PAGE_TOKENS, Segment

    longest = max(map(len, task.prompts))
    pages = -(-longest // PAGE_TOKENS)
    options = LoadOptions(
        backend="reference",
        arithmetic="plain",
        threads=1,
        weights=task.weights,
        cache_tokens=pages * PAGE_TOKENS,
        max_model_len=longest,
        max_running=longest,  # as many rows of logits as a prompt has tokens
        max_batch_tokens=longest,
    )
    _check_size(open_checkpoint(task.source, options))
    executable = load(task.source, options, text=False).executable
    parts = []
    for ids, rows in zip(task.prompts, task.rows, strict=True):
        executable.batch.fill([Segment(ids, 0, range(pages))], rows)
        executable.forward()
        parts.append(executable.logits().astype("<f4"))
    return np.concatenate(parts)


def _check_size(checkpoint: "Checkpoint") -> None:
    """Raises UnsupportedError for a model whose weights would take too much memory or time."""
    count = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    if count > MOST_WEIGHTS:
        reason = f"it has {count / 1e9:.1f} billion weights, and the reference is bounded to {MOST_WEIGHTS / 1e9:.1f}"
        raise UnsupportedError("golden prompts for this model", reason)


def _file(task: GoldenTask) -> Path:
    """Return the path that keeps a task's logits: another one where the model's file or our code is another."""
    from roofline.bundle.bundle_cache import key_of

    path = Path(task.source)
    source = key_of(path) if task.weights is None and path.exists() else ""
    facts = json.dumps([FORMAT, source, asdict(task)])
    return env.home() / "golden" / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.npy"


def _read(file: Path, rows: int) -> np.ndarray | None:
    try:
        return _parse(file.read_bytes(), rows)
    except OSError:
        return None


def _parse(data: bytes, rows: int) -> np.ndarray | None:
    """The logits of an .npy file; None where it is damaged or has another form."""
    try:
        logits: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return logits if logits.ndim == 2 and len(logits) == rows and logits.dtype == np.dtype("<f4") else None


def _keep(file: Path, data: bytes) -> None:
    with files.where_possible("the reference of golden prompts is", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(file, data)
        by_age = sorted(files.entries(file.parent), key=lambda entry: entry.stat().st_mtime, reverse=True)
        for old in by_age[KEPT:]:
            old.unlink(missing_ok=True)


def main() -> int:
    """Exit status 0 with the logits as an .npy file, UNSUPPORTED or 1 with the reason as the last line of the standard
    error."""
    from roofline.common.processes import die_with_parent

    die_with_parent()
    os.nice(19)
    values = json.load(sys.stdin)
    task = GoldenTask(**values)
    try:
        logits = logits_of(task)
    except UnsupportedError as error:
        print(error.reason.replace("\n", " "), file=sys.stderr)
        return UNSUPPORTED
    except RooflineError as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return 1
    np.save(sys.stdout.buffer, logits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
