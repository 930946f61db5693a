"""ChatModule: a conversation that keeps its history, with MLC's interface of `mlc_chat.ChatModule`."""

from typing import TYPE_CHECKING, Any

from roofline.engine.llm import LLM
from roofline.engine.params import SamplingParams
from roofline.engine.stats import EngineStats

if TYPE_CHECKING:
    from roofline.bundle import LoadedModel


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

    def generate(self, prompt: str, params: SamplingParams | None = None) -> str:
        """The answer to the next turn. An answer that fails or is interrupted leaves the conversation as it was."""
        turn = {"role": "user", "content": prompt}
        self._before = self.llm.stats()
        text = self.llm.chat([*self.messages, turn], params).text
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

    def stats(self) -> str:
        """Speed of the last `generate` or `benchmark_generate`: "prefill: 1234.5 tok/s, decode: 67.8 tok/s"."""
        return self.figures().speeds

    def reset_chat(self) -> None:
        """Forget the conversation."""
        self.messages.clear()
