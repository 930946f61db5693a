"""roofline serve: the OpenAI protocol over HTTP."""

from typing import Annotated

from roofline.cli.options import (
    DEFAULT_MODEL,
    Argument,
    Backend,
    Device,
    Draft,
    Exact,
    Isa,
    KvCacheDtype,
    Offload,
    Option,
    PipelineParallel,
    Speculate,
    SpeculateTokens,
    TensorParallel,
    Threads,
    Weights,
    placed,
)


def command(
    model: Annotated[str, Argument(help="A name, hf:ORG/REPO[:FILE], or a path.")] = DEFAULT_MODEL,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, Option(help="Needed on every route but /health. Default: ROOFLINE_API_KEY.")] = None,
    max_model_len: Annotated[int | None, Option(min=1, help="Longest prompt plus answer, in tokens.")] = None,
    served_model_name: Annotated[str | None, Option(help="The name that requests give. Default: MODEL.")] = None,
    cache_tokens: Annotated[int | None, Option(min=16, help="Tokens that the key-value cache holds.")] = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_running: Annotated[int, Option(min=1, help="Answers computed at the same time.")] = 64,
    speculate: Speculate = "off",
    draft: Draft = None,
    speculate_tokens: SpeculateTokens = 4,
    backend: Backend = "cpu",
    device: Device = "auto",
    exact: Exact = False,
    offload: Offload = "0",
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    threads: Threads = None,
    isa: Isa = None,
    weights: Weights = None,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/models, /health, /ready, /metrics, /stats."""
    from roofline.cli.ready import prepare
    from roofline.common import env
    from roofline.server.serve import ServeOptions, serve

    prepare(model, threads, isa, backend)
    if draft is not None:
        prepare(draft, threads, isa, backend)
    given = {
        "threads": threads,
        "isa": isa,
        "cache_tokens": cache_tokens,
        "weights": weights,
        "kv_cache_dtype": kv_cache_dtype,
        **placed(backend, device, exact, offload, tensor_parallel, pipeline_parallel),
    }
    serve(
        ServeOptions(
            model=model,
            host=host,
            port=port,
            api_key=api_key if api_key is not None else env.read("ROOFLINE_API_KEY"),
            max_model_len=max_model_len,
            served_model_name=served_model_name,
            max_running=max_running,
            speculate=speculate,
            draft=draft,
            speculate_tokens=speculate_tokens,
            load={name: value for name, value in given.items() if value is not None},
        )
    )
