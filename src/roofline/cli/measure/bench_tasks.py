"""roofline bench tasks: how often a model, alone or with an adapter, is right on tasks whose answers are known."""

from pathlib import Path
from typing import Annotated

from roofline.backends.options import LoadOptions
from roofline.cli.options import AdapterPlace, AsJson, ModelArgument
from roofline.cli.output import console, plain_table, print_json, print_table
from roofline.cli.parser import Argument, Without
from roofline.common.options import Option


def command(
    load: Annotated[LoadOptions, Without("max_adapters", "max_adapter_rank")],
    model: ModelArgument,
    data: Annotated[Path, Argument("A file or folder: LLM Foundry's in-context tasks, or samples with answers.")],
    adapter: AdapterPlace = None,
    split: Annotated[str | None, Option("Of a folder with several, train by default.")] = None,
    limit: Annotated[int | None, Option("Only so many tasks.", minimum=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Count right answers: choices by their log-probability, continuations and answers of chats by exact match. With
    --adapter they are counted twice, of the model alone too."""
    from dataclasses import replace

    from roofline.bench.quality.tasks import evaluate, read_tasks
    from roofline.cli.run.prepare import load_beside, load_llm, with_place_for
    from roofline.engine.config import EngineConfig
    from roofline.weights.adapters import read_adapter

    tasks = read_tasks(data, split)[:limit]
    path, load, engine = with_place_for(adapter, load, EngineConfig())
    if path is not None:
        load = replace(load, max_adapter_rank=read_adapter(path).rank)
    llm = load_llm(model, load, engine)
    scores = {"alone": evaluate(llm, tasks)}
    if path is not None:
        scores["with the adapter"] = evaluate(llm, tasks, load_beside(llm, path))
    if as_json:
        figures = {
            name: {kind: {**vars(result), "share": result.share, "error": result.error} for kind, result in of.items()}
            for name, of in scores.items()
        }
        print_json({"model": model, "data": str(data), "adapter": path, "accuracy": figures})
        return
    rows = [
        [kind, f"{result.tasks:,}", *(f"{of[kind].share:.1%} +- {of[kind].error:.1%}" for of in scores.values())]
        for kind, result in scores["alone"].items()
    ]
    print_table(console(), plain_table(("", "tasks", *scores), rows))
