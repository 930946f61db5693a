"""A program of a user, which type checkers read and nobody runs: every public name in the forms that the documents
show, and what comes back of the type that its documents say. One mistake is deliberate, marked below."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from typing import assert_type

import numpy as np
import torch

import roofline.torch
from roofline import LLM, BeamSearchParams, ChatModule, Constraint, SamplingParams
from roofline.bundle import LoadedModel, load
from roofline.callback import StreamToStdout
from roofline.common.errors import CapacityError, ConfigError, RequestError, RooflineError, UnsupportedError
from roofline.engine.llm import Answer, BeamAnswer, BeamSearchOutput, Output
from roofline.engine.stats import EngineStats
from roofline.extend import Callback, Program, register_callback, register_pass, registered
from roofline.torch import PackedLinear, TorchModel, ops, quantize_linears


def generating() -> list[str]:
    with LLM("tiny", threads=1, max_adapters=1) as llm:
        llm.generate("one text", SamplingParams(stop="\n", logit_bias={5: -100.0}, top_k=-1))
        llm.generate([5, 6, 7])
        llm.generate([[5, 6], [7]], [SamplingParams(seed=1), SamplingParams(stop=["a", "b"], stop_token_ids=[3])])
        llm.generate({"prompt": "text"}, use_tqdm=False)
        llm.generate([{"prompt_token_ids": [5, 6]}], parse_special=True)
        outputs = llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=3, n=2, logprobs=2))
        assert_type(outputs, list[Output])
        texts: list[str] = [output.text for output in outputs]
        assert_type(outputs[0].ids, list[int])
        assert_type(outputs[0].answers, list[Answer])
        first = outputs[0].logprobs
        if first is not None:
            assert_type(first[0].logprob, float)
        assert_type(outputs[0].usage.prompt_tokens, int)
        adapter = llm.load_adapter(Path("runs/own/adapter"))
        assert_type(adapter, str)
        messages = [{"role": "user", "content": "hi"}]
        assert_type(llm.chat(messages, SamplingParams(max_tokens=2), adapter=adapter, enable_thinking=False), Output)
        assert_type(llm.stream(messages, adapter=adapter), Generator[str, None, None])
        for piece in llm.stream("hi", SamplingParams(max_tokens=2)):
            texts.append(piece.upper())
        llm.unload_adapter(adapter)
        found = llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=2))
        assert_type(found, list[BeamSearchOutput])
        assert_type(found[0].answers[0], BeamAnswer)
        assert_type(found[0].answers[0].score, float)
        vectors: list[np.ndarray] = llm.embed(["a", "b"], pooling="mean", dimensions=8)
        assert_type(llm.score("a query", ["a document"]), list[float])
        assert_type(llm.stats(), EngineStats)
        assert_type(llm.encode("text"), list[int])
        return [*texts, llm.name, str(vectors[0].shape)]


def forms() -> SamplingParams:
    for form in (Constraint.of_json_schema({"type": "object"}), Constraint.of_choice(["yes", "no"])):
        print(form)
    return SamplingParams(constraint=Constraint.of_regex("[0-9]+"))


async def streaming(llm: LLM) -> None:
    pieces = llm.astream([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=4))
    assert_type(pieces, AsyncGenerator[str, None])
    async for piece in pieces:
        print(piece, end="")


def talking(llm: LLM) -> str:
    talk = ChatModule(model=llm)
    talk.reset_chat()
    talk.generate("hi", progress_callback=StreamToStdout(callback_interval=2))
    assert_type(talk.stats(verbose=True), str)
    return talk.generate("hi", SamplingParams(max_tokens=2)) + talk.benchmark_generate("hi", 8) + talk.stats()


def loading() -> LoadedModel:
    return load("tiny", backend="reference", cache_tokens=512)


def in_memory(model: torch.nn.Module) -> None:
    packed = PackedLinear.from_linear(torch.nn.Linear(64, 96), "Q8_0")
    ops.norm(torch.ones(2, 64), torch.ones(64))
    assert_type(quantize_linears(model, "Q4_0", keep=("lm_head",)), int)
    with roofline.torch.from_model(model, backend="cpu") as ours:
        assert_type(ours, TorchModel)
        assert_type(ours.logits(torch.tensor([[5, 6]])), torch.Tensor)
        assert_type(ours.generate_ids(torch.tensor([[5, 6]]), SamplingParams(max_tokens=3)), list[torch.Tensor])
        if ours.llm is not None:
            assert_type(ours.llm.generate("a")[0].text, str)
    print(packed)
    roofline.torch.serve(model, port=0, api_key="own")


class Goal(Callback):
    def __init__(self, loss: float) -> None:
        self.loss = loss

    def earlier(self, lines: Sequence[Mapping[str, object]]) -> str | None:
        return None

    def evaluation(self, line: Mapping[str, object]) -> str | None:
        return f"held-out loss {line['eval_loss']}" if line else None


def same(program: Program) -> Program:
    return program


def extending() -> None:
    register_pass("same", same, after="trace")
    register_callback("goal", Goal)
    print([entry.name for entry in registered()])


def failing(llm: LLM) -> None:
    try:
        llm.generate("")
    except RequestError as error:
        print(error.status, error.param)
    except (ConfigError, CapacityError, UnsupportedError, RooflineError) as error:
        print(error)
    SamplingParams(temperature="hot")  # the deliberate mistake


if __name__ == "__main__":
    print(generating(), forms(), loading().name, asyncio.run(streaming(LLM("tiny"))))
