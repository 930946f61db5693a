"""roofline eval: how well a model predicts a text, with one or several formats of its key-value cache."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from roofline.backends.options import DEFAULT_MODEL, LoadOptions
from roofline.cli.options import AsJson, ModelArgument
from roofline.cli.output import print_json
from roofline.cli.parser import Without
from roofline.cli.progress import counted_bar
from roofline.cli.scores import print_scores, read_text
from roofline.common.errors import ConfigError
from roofline.common.options import Option, declared

_FIXED = (  # by the context and the size of a step
    *("kv_cache_dtype", "cache_tokens", "max_model_len", "max_running", "max_batch_tokens", "max_adapters"),
    *("max_adapter_rank", "tensor_parallel", "pipeline_parallel"),
)


def command(
    load: Annotated[LoadOptions, Without(*_FIXED)],
    text: Annotated[Path, Option("A file of UTF-8 text that the model was not trained on.")],
    model: ModelArgument = DEFAULT_MODEL,
    context: Annotated[
        int | None, Option("Tokens of a window. Default: 2,048, or what the model has if less.", minimum=2)
    ] = None,
    stride: Annotated[
        int | None, Option("Tokens from one window to the next. Default: half a window.", minimum=1)
    ] = None,
    kv_dtypes: Annotated[
        str, Option("Formats of the key-value cache, with commas; all are compared with the first.")
    ] = "auto",
    limit: Annotated[int | None, Option("Score only so many tokens of the text.", minimum=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a text, every token scored once, and tokens per second.

    Several formats of the cache are compared by perplexity, divergence and the most likely token at each place.
    """
    from roofline.bench.quality.score import load_to_score, score, text_windows
    from roofline.cli.run.prepare import prepare

    kinds = _formats(kv_dtypes)
    words = read_text(text)
    prepare(model, load.threads, load.isa, load.backend)
    longest = _window(context, model, load)
    models = [
        load_to_score(model, replace(load, kv_cache_dtype=kind), longest, text=not at) for at, kind in enumerate(kinds)
    ]
    tokenizer = models[0].tokenizer
    assert tokenizer is not None, "it was loaded with its text side"
    windows = text_windows(tokenizer, words, longest, stride or longest // 2, limit)
    with counted_bar("scoring") as bar:
        scores = score([model.executable for model in models], windows, bar)
    if as_json:
        about = {"model": model, "text": str(text), "context": longest, "stride": stride or longest // 2}
        print_json(about | {"kv": {kind: each.facts() for kind, each in zip(kinds, scores, strict=True)}})
        return
    print(f"{model} on {text}: {scores[0].tokens:,} tokens in {len(windows)} windows of {longest:,}")
    print_scores("KV cache", kinds, scores)


def _formats(names: str) -> list[str]:
    """The formats of --kv-dtypes. Raises ConfigError for one that there is not, one that is named twice, and none."""
    kinds = [kind.strip() for kind in names.split(",") if kind.strip()]
    if not kinds:
        raise ConfigError("--kv-dtypes names no format: auto, bf16 or int8, for example")
    declared_format = replace(declared(LoadOptions)["kv_cache_dtype"], name="--kv-dtypes")
    for at, kind in enumerate(kinds):
        declared_format.check(kind)
        if kind in kinds[:at]:
            raise ConfigError(f"--kv-dtypes names {kind} twice")
    return kinds


def _window(context: int | None, model: str, load: LoadOptions) -> int:
    """Tokens of a window: --context, or 2,048 or what the model has if less. Raises ConfigError where it has fewer."""
    from roofline.bundle.sources import open_source

    _, source = open_source(model, load)
    config = source.manifest.config if hasattr(source, "manifest") else source.config
    positions = int(config["max_position"])
    if context is not None and context > positions:
        raise ConfigError(f"--context {context:,} is more than the model's {positions:,} positions")
    return context or min(2048, positions)
