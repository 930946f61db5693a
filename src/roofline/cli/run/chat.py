"""roofline chat: a conversation in the terminal, or piped through stdin line by line."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

from roofline.cli.options import (
    DEFAULT_MODEL,
    Activations,
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
from roofline.common.errors import ConfigError, RooflineError

HELP = """\
/help            this list
/stats           speeds and the share of the roof, since the last /reset
/reset           forget the conversation
/reload [MODEL]  load the model again, or another one; forgets the conversation
/set K=V[;K=V]   change a sampling parameter, e.g. /set temperature=0.2;max_tokens=100;stop=["\\n"]
/exit            leave (so does Ctrl-D); Ctrl-C stops an answer"""


def command(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, Option("--system", help="The system message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
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
    """Talk to a model; answers stream. Type /help for commands."""
    from roofline.cli.run.prepare import load_llm
    from roofline.engine.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    options: dict[str, Any] = {
        "speculate": speculate,
        "draft": draft,
        "speculate_tokens": speculate_tokens,
        "kv_cache_dtype": kv_cache_dtype,
        **placed(backend, device, exact, offload, tensor_parallel, pipeline_parallel, activations),
    }
    session = Session(lambda name: load_llm(name, threads, isa, weights, **options), model, params, system)
    try:
        session.run()
    finally:
        session.close()


class Session:
    """One conversation: its model, parameters and messages.

    Args:
        load: makes an LLM from a model's name.
    """

    def __init__(self, load: Callable[[str], Any], model: str, params: Any, system: str | None) -> None:
        self.load, self.model, self.params, self.system = load, model, params, system
        self.llm = load(model)
        self._commands = {"help": self._help, "stats": self._stats, "reset": self._reset, "reload": self._reload}
        self._commands["set"] = self._set
        self._reset("")

    def run(self) -> None:
        """Read and answer until /exit or the end of the input."""
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  line editing for input()

            print(f"{self.llm.name}: type /help for commands, /exit to leave.")
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\nType /exit to leave.")
                continue
            if line == "/exit":
                return
            try:
                self._command(line) if line.startswith("/") else self._answer(line)
            except RooflineError as error:
                print(f"roofline: {error}", file=sys.stderr)

    def close(self) -> None:
        """Free the model."""
        self.llm.close()

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        known = self._commands.get(name)
        if known is None:
            raise ConfigError(f"there is no command /{name}; type /help")
        known(rest.strip())

    def _answer(self, line: str) -> None:
        if not line:
            return
        self.messages.append({"role": "user", "content": line})
        said: list[str] = []
        pieces = self.llm.stream(self.messages, self.params)
        try:
            for piece in pieces:
                said.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass  # stops the answer; what was said stays in the conversation
        except RooflineError:
            self.messages.pop()
            raise
        finally:
            pieces.close()
        print()
        self.messages.append({"role": "assistant", "content": "".join(said)})

    def _help(self, _: str) -> None:
        print(HELP)

    def _stats(self, _: str) -> None:
        from roofline.cli.run.prepare import figures_line

        print(figures_line(self.llm.stats().since(self._since)))

    def _reset(self, _: str) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._since = self.llm.stats()

    def _reload(self, name: str) -> None:
        # The old model is freed first: two may not fit.
        self.llm.close()
        wanted = name or self.model
        try:
            self.llm = self.load(wanted)
        except RooflineError:
            self.llm = self.load(self.model)
            raise
        finally:
            self._reset("")
        self.model = wanted
        print(f"{self.llm.name} is loaded")

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
