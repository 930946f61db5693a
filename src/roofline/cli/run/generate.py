"""roofline generate: answer one prompt."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

from roofline.cli.options import (
    DEFAULT_MODEL,
    Activations,
    Argument,
    AsJson,
    Backend,
    Device,
    Draft,
    Exact,
    Isa,
    KvCacheDtype,
    MaxTokens,
    Model,
    Offload,
    Option,
    PipelineParallel,
    Seed,
    Speculate,
    SpeculateTokens,
    Temperature,
    TensorParallel,
    Threads,
    TopP,
    Weights,
    placed,
)

if TYPE_CHECKING:
    from roofline.engine.llm import Output


def command(
    prompt: Annotated[str, Argument(help="The prompt; - reads it from stdin.")],
    model: Model = DEFAULT_MODEL,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    raw: Annotated[bool, Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    stream: Annotated[bool, Option("--stream/--no-stream", help="Print the text as it comes.")] = True,
    as_json: AsJson = False,
    backend: Backend = "cpu",
    device: Device = "auto",
    exact: Exact = False,
    activations: Activations = "auto",
    offload: Offload = "0",
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    threads: Threads = None,
    isa: Isa = None,
    weights: Weights = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    speculate: Speculate = "off",
    draft: Draft = None,
    speculate_tokens: SpeculateTokens = 4,
) -> None:
    """Answer PROMPT, then print tokens a second and the share of the roof (on stderr)."""
    from roofline.cli.run.prepare import figures, figures_line, load_llm
    from roofline.engine.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    options: dict[str, Any] = {
        "speculate": speculate,
        "draft": draft,
        "speculate_tokens": speculate_tokens,
        "kv_cache_dtype": kv_cache_dtype,
        **placed(backend, device, exact, offload, tensor_parallel, pipeline_parallel, activations),
    }
    with load_llm(model, threads, isa, weights, **options) as llm:
        asked = text if raw else [{"role": "user", "content": text}]
        if as_json or not stream:
            output = llm.generate(text, params)[0] if raw else llm.chat(asked, params)
            if as_json:
                _print_json(llm, output, figures(llm.stats()))
                return
            print(output.text)
        else:
            for piece in llm.stream(asked, params):
                print(piece, end="", flush=True)
            print()
        print(figures_line(llm.stats()), file=sys.stderr)


def _print_json(llm: Any, output: "Output", speeds: dict[str, Any]) -> None:
    import json

    usage = output.usage
    record = {
        "model": llm.name,
        "fingerprint": llm.model.executable.fingerprint,
        "prompt_ids": output.prompt_ids,
        "text": output.text,
        "ids": output.ids,
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "seed": usage.seed,
        },
        "load_seconds": round(llm.model.load_seconds, 3),
        "stats": speeds,
    }
    print(json.dumps(record))
