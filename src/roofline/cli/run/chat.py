"""roofline chat: a conversation in the terminal, or piped through stdin line by line."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from roofline.backends.options import DEFAULT_MODEL, LoadOptions
from roofline.cli.options import AdaptedModelOptions, ModelArgument, Stop, System
from roofline.cli.parser import NamedOptions
from roofline.cli.streams import checked, read_line
from roofline.common.errors import ConfigError, RooflineError
from roofline.engine.config import EngineConfig
from roofline.engine.params import SamplingParams

if TYPE_CHECKING:
    from roofline.engine.llm import LLM

HELP = """\
/help            this list
/stats           speeds and the share of the roof, since the last /reset
/reset           forget the conversation
/reload [MODEL]  load the model again, or another one, without the adapter; forgets the conversation
/set K=V[;K=V]   change a sampling parameter, e.g. /set temperature=0.2;max_tokens=100;stop=["\\n"]
/exit            leave (so does Ctrl-D); Ctrl-C stops an answer"""


def command(
    load: LoadOptions,
    engine: EngineConfig,
    models: AdaptedModelOptions,
    params: SamplingParams,
    model: ModelArgument = DEFAULT_MODEL,
    system: System = None,
    stop: Stop = None,
    named: Annotated[frozenset[str], NamedOptions()] = frozenset(),
) -> int:
    """Talk to a model; answers stream. Type /help for commands.

    What is not said of sampling is what the model's files recommend, or else temperature 0.7 and top-p 0.9.
    """
    from roofline.cli.run.prepare import load_llm, sampling, system_message, with_place_for

    adapter, load, engine = with_place_for(models.adapter, load, engine)
    session = Session(
        lambda name: load_llm(name, load, engine, models.draft), models.model, system_message(system), adapter
    )
    session.params = sampling(session.llm, params, named, stop)
    try:
        return session.run()
    finally:
        session.close()


class Session:
    """One conversation: its model, parameters and messages.

    Args:
        load: makes an LLM from a model's name, with a place for an adapter where there is one.
        start: the messages that it begins with.
        adapter: the path of the adapter that the model answers with.
    Raises:
        RequestError: the model has no chat template.
        ConfigError, UnsupportedError, CapacityError: the adapter does not fit beside the model.
    """

    def __init__(
        self,
        load: "Callable[[str], LLM]",
        model: str,
        start: Sequence[Mapping[str, str]] = (),
        adapter: str | None = None,
    ) -> None:
        self.load, self.model, self.params, self.start = load, model, SamplingParams(), start
        self.adapter = adapter
        self.llm, self._digest = self._loaded(model, adapter)
        self._commands = {
            "help": lambda _: print(HELP), "stats": self._stats, "reset": self._reset, "reload": self._reload,
            "set": self._set,
        }  # fmt: skip
        self._reset("")

    def run(self) -> int:
        """Read and answer until /exit or the end of the input; the exit status: 1 where a line from a pipe failed."""
        status = 0
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  line editing for input()

            print(f"{self._title}: type /help for commands, /exit to leave.")
        while True:
            try:
                line = (input("> ") if interactive else read_line()).strip()
            except EOFError:
                return status
            except KeyboardInterrupt:
                print("\nType /exit to leave.")
                continue
            if line == "/exit":
                return status
            try:
                self._command(line) if line.startswith("/") else self._answer(checked(line, "the line"))
            except RooflineError as error:
                print(f"roofline: {error}", file=sys.stderr)
                status = 0 if interactive else 1

    def close(self) -> None:
        """Free the model."""
        self.llm.close()

    def _command(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        if name not in self._commands:
            raise ConfigError(f"there is no command /{name}; type /help")
        self._commands[name](argument.strip())

    def _answer(self, line: str) -> None:
        if not line:
            return
        self.messages.append({"role": "user", "content": line})
        answer: list[str] = []
        pieces = self.llm.stream(self.messages, self.params, adapter=self._digest)
        try:
            for piece in pieces:
                answer.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass  # stops the answer; the text so far stays in the conversation
        except RooflineError:
            self.messages.pop()
            raise
        finally:
            pieces.close()
        print()
        self.messages.append({"role": "assistant", "content": "".join(answer)})

    @property
    def _title(self) -> str:
        return self.llm.name if self.adapter is None else f"{self.llm.name} with the adapter {self.adapter}"

    def _loaded(self, name: str, adapter: str | None) -> "tuple[LLM, str | None]":
        """A model that can chat, and what its adapter is called there. Raises RequestError for one that has no chat
        template, and for an adapter that does not fit as `LLM.load_adapter` does."""
        from roofline.cli.run.prepare import load_beside

        llm = self.load(name)
        try:
            llm.chat_template.check_fits(llm.tokenizer)
        except RooflineError:
            llm.close()
            raise
        return llm, load_beside(llm, adapter)

    def _stats(self, _: str) -> None:
        from roofline.cli.run.prepare import confirm_roofs, figures_line

        print(figures_line(confirm_roofs(self.llm, self.llm.stats().since(self._since))))

    def _reset(self, _: str) -> None:
        self.messages = [dict(message) for message in self.start]
        self._since = self.llm.stats()

    def _reload(self, name: str) -> None:
        # The old model is freed first: two may not fit.
        self.llm.close()
        model, adapter = (name, None) if name else (self.model, self.adapter)
        try:
            self.llm, self._digest = self._loaded(model, adapter)
        except RooflineError:
            self.llm, self._digest = self._loaded(self.model, self.adapter)
            raise
        finally:
            self._reset("")
        self.model, self.adapter = model, adapter
        print(f"{self._title} is loaded")

    def _set(self, text: str) -> None:
        """Apply K=V pairs, all or none. Values are JSON, or else plain text."""
        import json
        from dataclasses import fields, replace

        names = [field.name for field in fields(self.params)]
        changes: dict[str, Any] = {}
        for pair in filter(None, (part.strip() for part in text.split(";"))):
            name, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or name not in names:
                raise ConfigError(f"/set {pair}: give K=V with K one of {', '.join(names)}")
            try:
                changes[name] = json.loads(value)
            except ValueError:
                changes[name] = value
        self.params = replace(self.params, **changes)
        print(", ".join(f"{name}={getattr(self.params, name)!r}" for name in changes or names))
