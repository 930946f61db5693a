"""A beam search over an engine in another process, as the stream of events of one request."""

from collections.abc import AsyncGenerator, Sequence

from roofline.engine.beams import BeamSearch
from roofline.engine.checks import RequestOptions
from roofline.engine.events import Event
from roofline.engine.facade import AsyncEngine
from roofline.engine.process.stream import EventStream


async def beam_stream(
    engine: AsyncEngine, prompt: Sequence[int], search: BeamSearch, request_id: str, options: RequestOptions
) -> AsyncGenerator[Event, None]:
    """The answers of a search, each as one event, once all are found; where the engine fails, an error for each.

    Each step is a request for every beam, with `options`, under a name of its own that begins with `request_id`.
    Leaving the generator ends those that are under way. Raises as `submit`.
    """
    step = cached = 0
    while not search.done:
        streams: list[EventStream] = []
        tops: list[Sequence[tuple[int, float]]] = []
        try:
            for number, beam in enumerate(search.beams):
                name = f"{request_id}-{step}.{number}"
                ids = [*prompt, *beam.ids]
                step_options: RequestOptions = {**options, "eos_ids": (), "request_id": name}
                streams.append(await engine.submit(ids, search.step_params, **step_options))
            for stream in streams:
                async for event in stream:
                    if event.finish_reason in ("error", "abort"):
                        for index in range(search.told):
                            yield Event(
                                request_id=request_id,
                                index=index,
                                ids=[],
                                logprobs=None,
                                finish_reason="error",
                                stop_id=None,
                                error=event.error or "it was ended",
                            )
                        return
                    if event.logprobs:
                        tops.append(event.logprobs[0].top)
                    if step == 0 and event.usage is not None:
                        cached = event.usage.cached_tokens
        finally:
            for stream in streams:
                await stream.aclose()
        search.extend(tops)
        step += 1
    for event in search.events(request_id, len(prompt), cached):
        yield event
