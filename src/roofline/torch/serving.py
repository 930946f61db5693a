"""serve: a model in memory behind our HTTP server, in this process."""

from typing import Any

from roofline.common.errors import ConfigError
from roofline.engine.process.thread import engine_in_thread
from roofline.server.options import ServeOptions
from roofline.server.serve import serve_engine
from roofline.server.text_side import TextSide
from roofline.torch.checkpoint import PretrainedModel, PretrainedTokenizer
from roofline.torch.model import TorchModel, from_model


def serve(
    model: PretrainedModel,
    tokenizer: PretrainedTokenizer = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    name: str | None = None,
    api_key: str | None = None,
    **options: Any,
) -> None:
    """Serve a model from memory over HTTP until SIGTERM or SIGINT; call it from the main thread.

    The routes, limits and answers are those of `roofline serve`. Engine and HTTP share this process, so a crash of one
    takes the other down, and there is no restart: a model on disk is better served by `roofline serve`.

    Args:
        model: as `from_model` takes it, or what it returned (with a tokenizer); that one stays open.
        tokenizer: transformers' tokenizer for the model.
        host, port: address to listen on; port 0 takes a free one.
        name: what requests call the model; None takes the model's own name.
        api_key: needed on every route but /health and the chat page when given.
        options: as `from_model`'s.

    Raises:
        ConfigError, UnsupportedError, CapacityError: with cause and remedy; the address is taken.
    """
    if isinstance(model, TorchModel):
        if options or tokenizer is not None:
            raise ConfigError("a model that from_model returned has its tokenizer and options: give them there")
        ours = model
    else:
        if tokenizer is None:
            raise ConfigError("a served model needs its tokenizer: serve(model, tokenizer)")
        ours = from_model(model, tokenizer, **options)
    if ours.llm is None:
        raise ConfigError("a served model needs its tokenizer: from_model(model, tokenizer)")
    chosen = ServeOptions(ours.loaded.name, host, port, api_key, served_model_name=None if name is None else [name])
    text = TextSide(ours.llm.tokenizer, ours.llm.chat_template)
    try:
        serve_engine(chosen, engine_in_thread(ours.loaded.name, ours.engine), text)
    finally:
        if ours is not model:
            ours.close()
