"""ChatModule: a conversation that keeps its history, with MLC's interface of `mlc_chat.ChatModule`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from roofline.engine.llm import LLM
from roofline.engine.params import SamplingParams, invalid
from roofline.engine.stats import EngineStats

if TYPE_CHECKING:
    from roofline.bundle import LoadedModel


class ProgressCallback(Protocol):
    """What is told of an answer while it comes; `roofline.callback` has one that prints it, and MLC's own fit."""

    callback_interval: int  # pieces of the answer between two calls

    def __call__(self, message: str = "", stopped: bool = False) -> object:
        """message: the answer so far; stopped: there is no more of it."""


class ChatModule:
    """One conversation with one model: `model` and `options` are as for `LLM`, or `model` is an LLM to be used."""

    def __init__(self, model: "str | LoadedModel | LLM" = "smollm2-135m", **options: Any) -> None:
        if isinstance(model, LLM):
            if options:
                raise TypeError(f"a loaded LLM takes no option {', '.join(sorted(options))}")
            self.llm = model
        else:
            self.llm = LLM(model, **options)
        self.messages: list[dict[str, str]] = []
        self._before: EngineStats = self.llm.stats()

    def generate(
        self, prompt: str, params: SamplingParams | None = None, progress_callback: ProgressCallback | None = None
    ) -> str:
        """The answer to the next turn. An answer that fails or is interrupted leaves the conversation as it was.

        progress_callback: called with the answer so far every `callback_interval` pieces and at its end, then with
        stopped=True; such as `roofline.callback.StreamToStdout(callback_interval=2)`.
        """
        turn = {"role": "user", "content": prompt}
        messages = [*self.messages, turn]
        self._before = self.llm.stats()
        if progress_callback is None:
            text = self.llm.chat(messages, params).text
        else:
            text = _told(self.llm.stream(messages, params), progress_callback)
        self.messages += [turn, {"role": "assistant", "content": text}]
        return text

    def benchmark_generate(self, prompt: str, generate_length: int) -> str:
        """Exactly `generate_length` greedy tokens after the bare prompt, outside the conversation, for `stats`."""
        params = SamplingParams(temperature=0.0, max_tokens=generate_length, ignore_eos=True)
        self._before = self.llm.stats()
        return self.llm.generate(prompt, params)[0].text

    def figures(self) -> EngineStats:
        """What the engine counted since the last `generate` or `benchmark_generate` began."""
        return self.llm.stats().since(self._before)

    def stats(self, verbose: bool = False) -> str:
        """Speed of the last `generate` or `benchmark_generate`: "prefill: 1234.5 tok/s, decode: 67.8 tok/s"; verbose:
        with tokens and seconds, on lines of their own."""
        figures = self.figures()
        if not verbose:
            return figures.speeds
        prefill = _block("prefill", figures.prefill_tokens, figures.prefill_seconds)
        return prefill + _block("decode", figures.decode_tokens, figures.decode_seconds)

    def reset_chat(self) -> None:
        """Forget the conversation."""
        self.messages.clear()


def _told(pieces: Iterable[str], callback: ProgressCallback) -> str:
    """The text of the pieces, of which the callback is told. Raises RequestError for one that has no interval."""
    interval = getattr(callback, "callback_interval", None)
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise invalid("progress_callback", f"its callback_interval is {interval!r}, not a number of at least 1")
    text = ""
    reported = True
    try:
        for number, piece in enumerate(pieces):
            text += piece
            reported = number % interval == 0
            if reported:
                callback(text)
        if not reported:
            callback(text)
    finally:
        callback(stopped=True)
    return text


def _block(title: str, tokens: int, seconds: float) -> str:
    speed = tokens / seconds if seconds else 0.0
    lines = (f"{f' {title} ':-^31}", f"throughput: {speed:.1f} tok/s", f"total tokens: {tokens} tok")
    return "\n".join((*lines, f"total time: {seconds:.3f} s\n"))
