"""What keys of a configuration say against each other, across its sections."""

from collections.abc import Iterator

from roofline.train.config.faults import Fault
from roofline.train.config.schema import TrainConfig


def conflicts(config: TrainConfig) -> Iterator[Fault]:
    """Each fault of a configuration whose sections are right by themselves."""
    max_length = config.tokenizer.kwargs.model_max_length if config.tokenizer is not None else None
    if max_length is not None and max_length < config.max_seq_len:
        key = "tokenizer.kwargs.model_max_length"
        yield Fault(key, f"rows of {config.max_seq_len} tokens are longer than {key}={max_length}")
    yield from _of_adapter(config)
    if isinstance(config.eval_loader, tuple):
        labels = [loader.label for loader in config.eval_loader]
        if not labels or None in labels or len({*labels}) < len(labels):
            yield Fault("eval_loader.label", "eval_loader: each of several needs a label of its own")
    loaders = (config.train_loader, *config.evaluations.values())
    if config.tokenizer is None and any(loader.dataset.hf_name is not None for loader in loaders):
        yield Fault("tokenizer", "samples of hf_name are read with a model's tokenizer: tokenizer.name is missing")
    for number, loader in enumerate(config.evaluations.values()):
        if (loader.name == "finetuning") != (config.train_loader.name == "finetuning"):
            key = f"eval_loader.{number}.name" if isinstance(config.eval_loader, tuple) else "eval_loader.name"
            yield Fault(key, f"{key}={loader.name} does not go with train_loader.name={config.train_loader.name}")
    yield from _of_objectives(config)
    if config.callbacks.samples is not None and config.tokenizer is None:
        text = "callbacks.generate_callback needs the tokenizer of its prompts: tokenizer.name is missing"
        yield Fault("tokenizer", text)
    stopper = config.callbacks.early_stopper
    if stopper is None or stopper.dataloader_label == "train":
        return
    missing = {"eval_loader": not config.evaluations, "eval_interval": config.eval_interval == "0ba"}
    for key in (key for key, is_missing in missing.items() if is_missing):
        yield Fault(key, f"callbacks.early_stopper watches evaluations: {key} is missing")
    if config.evaluations and stopper.label not in config.evaluations:
        key, choices = "callbacks.early_stopper.dataloader_label", ", ".join(["train", *config.evaluations])
        yield Fault(key, f"{key}={stopper.dataloader_label} is none of {choices}")


def _of_objectives(config: TrainConfig) -> Iterator[Fault]:
    names = [name for name in ("dpo", "grpo") if getattr(config, name) is not None]
    if not names:
        return
    if len(names) > 1:
        yield Fault("grpo", "dpo and grpo exclude each other")
    name, loader = names[0], config.train_loader.name
    if loader != "finetuning":
        yield Fault("train_loader.name", f"{name} needs train_loader.name=finetuning, not {loader}")
    if config.model.loss_fn == "torch_crossentropy":
        yield Fault(
            "model.loss_fn", f"{name} computes logits chunk by chunk: leave out model.loss_fn=torch_crossentropy"
        )
    if config.tensor_parallel > 1:
        text = f"{name} is not computed with tensor_parallel: leave it out, FSDP shards as well"
        yield Fault("tensor_parallel", text)
    if config.grpo is None:
        return
    if config.adapter is None:
        yield Fault("adapter", "grpo needs adapter, which says what is trained: {method: lora} or {method: full}")
    elif config.adapter.base not in ("bf16", "f32", "stored"):
        text = (
            f"adapter.base={config.adapter.base}: grpo samples from the model's own files, so quantise them first "
            "(`roofline quantize`) and set base=stored"
        )
        yield Fault("adapter.base", text)
    if config.elastic is not None:
        yield Fault("elastic", "grpo runs in one process: leave out elastic")


def _of_adapter(config: TrainConfig) -> Iterator[Fault]:
    """What an adapter needs, and what cannot be had with it."""
    if config.adapter is None:
        return
    if not config.model.loads_weights:
        text = "adapter: there must be a model to adapt: set model.name=hf_causal_lm and pretrained: true"
        yield Fault("adapter", text)
    if config.adapter.method == "full":
        return
    if config.tensor_parallel > 1:
        text = f"adapter.method={config.adapter.method} divides no matrix: tensor_parallel must be 1, use fsdp_config"
        yield Fault("tensor_parallel", text)
    if config.callbacks.hf_checkpointer is not None:
        text = (
            "callbacks.hf_checkpointer writes models, and an adapter is none: leave it out; the adapter is written to "
            "the run's folder"
        )
        yield Fault("callbacks.hf_checkpointer", text)
