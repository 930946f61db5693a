"""roofline serve: the OpenAI protocol over HTTP."""

from typing import Annotated, Any

from roofline.cli.options import (
    DEFAULT_MODEL,
    Activations,
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
    cache_tokens: Annotated[int | None, Option(min=16, help="Tokens that a replica's key-value cache holds.")] = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_running: Annotated[
        int | None, Option(min=1, help="Answers that a replica computes at the same time. Default: 64; on a GPU 256.")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, Option(min=1, help="Tokens that a replica computes in one step. Default: 512; on a GPU 2,048.")
    ] = None,
    speculate: Speculate = "off",
    draft: Draft = None,
    speculate_tokens: SpeculateTokens = 4,
    backend: Backend = "cpu",
    device: Device = "auto",
    exact: Exact = False,
    activations: Activations = "auto",
    offload: Offload = "0",
    data_parallel: Annotated[
        int,
        Option("--data-parallel", "--dp", min=1, help="Replicas of the model that share the requests, and the cores."),
    ] = 1,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    threads: Threads = None,
    isa: Isa = None,
    weights: Weights = None,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/models, /health, /ready, /metrics, /stats."""
    from roofline.cli.run.prepare import prepare
    from roofline.common import env
    from roofline.hardware.cores import pinned_to
    from roofline.server.serve import ServeOptions, serve

    given = {
        "threads": threads,
        "isa": isa,
        "cache_tokens": cache_tokens,
        "weights": weights,
        "kv_cache_dtype": kv_cache_dtype,
        **placed(backend, device, exact, offload, tensor_parallel, pipeline_parallel, activations),
    }
    load = {name: value for name, value in given.items() if value is not None}
    cores, threads = _place(load, data_parallel) if data_parallel > 1 else ([], threads)
    with pinned_to(cores):
        for name in filter(None, (model, draft)):
            prepare(name, threads, isa, backend)
    serve(
        ServeOptions(
            model=model,
            host=host,
            port=port,
            api_key=api_key if api_key is not None else env.read("ROOFLINE_API_KEY"),
            max_model_len=max_model_len,
            served_model_name=served_model_name,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            speculate=speculate,
            draft=draft,
            speculate_tokens=speculate_tokens,
            data_parallel=data_parallel,
            load=load,
        )
    )


def _place(load: dict[str, Any], copies: int) -> tuple[list[int], int | None]:
    """Cores and threads of the first of so many copies: roofs are to be those of what one of them has."""
    from roofline.bundle.replicas import divided

    place = divided(load, copies)[0]
    return place.cores, place.options.get("threads")
