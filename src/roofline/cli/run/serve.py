"""roofline serve: a model over HTTP, in the protocols of OpenAI and of other servers."""

from dataclasses import replace
from typing import Annotated

from roofline.backends.options import DEFAULT_MODEL, LoadOptions
from roofline.cli.options import Draft, ModelArgument
from roofline.cli.parser import NamedOptions, reads_option_file, understands
from roofline.engine.config import EngineConfig
from roofline.engine.keywords import own_words
from roofline.server.options import ServeOptions


@reads_option_file
@understands(own_words)
def command(
    options: ServeOptions,
    load: LoadOptions,
    engine: EngineConfig,
    model: ModelArgument = DEFAULT_MODEL,
    draft: Draft = None,
    named: Annotated[frozenset[str], NamedOptions()] = frozenset(),
) -> None:
    """Serve a model: a chat page at /, /v1/chat/completions, /v1/responses, /v1/models, /ready, /metrics and more."""
    from roofline.cli.run.prepare import prepare
    from roofline.common import env
    from roofline.common.errors import ConfigError
    from roofline.common.processes import hide_argument
    from roofline.hardware.cores import pinned_to
    from roofline.server.places import check_places
    from roofline.server.serve import serve

    env.quiet_numpy()
    if "uds" in named and (places := named & {"host", "port"}):  # also at their defaults
        raise ConfigError(f"--uds and --{min(places)}: a server listens in one place; leave one of the two out")
    key = options.api_key if options.api_key is not None else env.read("ROOFLINE_API_KEY")
    env.forget("ROOFLINE_API_KEY")  # the processes of engines, which read files of strangers, need no key
    if key is not None:
        hide_argument(key)
    options = replace(options, model=model, draft=draft, load=load, engine=engine, api_key=key)
    check_places(options)  # before a model is fetched
    cores, threads = list[int](), load.threads
    if options.data_parallel > 1:  # the roofs to measure are those of what the first replica has
        from roofline.bundle.replicas import divided

        place = divided(load, options.data_parallel)[0]
        cores, threads = place.cores, place.options.get("threads")
    with pinned_to(cores):
        for name in filter(None, (model, draft)):
            prepare(name, threads, load.isa, load.backend)
    serve(options)
