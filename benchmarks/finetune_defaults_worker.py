"""A contestant of benchmarks.finetune_defaults, or its judge.

It imports nothing of ours, as its interpreter may be another.

peft|trl MODEL DATA OUT SECONDS     judge MODEL QUESTIONS ADAPTER
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers


class Clock(transformers.TrainerCallback):
    """Stops after so many seconds of steps, and counts them."""

    def __init__(self, limit: float) -> None:
        self.limit, self.seconds, self.steps, self._begin = limit, 0.0, 0, 0.0

    def on_step_begin(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        self._begin = time.perf_counter()

    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        self.seconds += time.perf_counter() - self._begin
        self.steps += 1
        control.should_training_stop = control.should_training_stop or self.seconds >= self.limit


def tokenizer_of(model: str) -> "transformers.PreTrainedTokenizerBase":
    """The tokenizer of a folder, which pads with its end token where it names no other."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encoded(tokenizer: "transformers.PreTrainedTokenizerBase", messages: list[dict[str, str]]) -> tuple[list[int], int]:
    """Ids of a chat up to the end of its answer, and how many of them are the prompt."""
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    text = str(prompt) + messages[-1]["content"] + tokenizer.eos_token
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids, len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def read(path: str) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in Path(path).read_text().splitlines()]


def peft(model: str, data: str, out: str, clock: Clock) -> dict[str, float]:
    """transformers' Trainer with peft's LoraConfig: the defaults of both; answers alone are targets."""
    from peft import LoraConfig, get_peft_model

    tokenizer = tokenizer_of(model)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tuned = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"))
    samples = [encoded(tokenizer, messages) for messages in read(data)]
    rows = [{"input_ids": ids, "labels": [-100] * at + ids[at:]} for ids, at in samples]
    arguments = transformers.TrainingArguments(output_dir=out, use_cpu=True, report_to=[], save_strategy="no")
    collator = transformers.DataCollatorForSeq2Seq(tokenizer)
    transformers.Trainer(tuned, arguments, train_dataset=rows, data_collator=collator, callbacks=[clock]).train()
    tuned.save_pretrained(out)
    return {"batch": arguments.per_device_train_batch_size, "lr": arguments.learning_rate}


def trl(model: str, data: str, out: str, clock: Clock) -> dict[str, float]:
    """TRL's SFTTrainer with peft's LoraConfig, at its defaults."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"prompt": m[:-1], "completion": m[-1:]} for m in read(data)])
    arguments = SFTConfig(output_dir=out, use_cpu=True, report_to=[], save_strategy="no")
    given = {"train_dataset": rows, "peft_config": LoraConfig(), "processing_class": tokenizer_of(model)}
    trainer = SFTTrainer(model, arguments, callbacks=[clock], **given)
    trainer.train()
    trainer.model.save_pretrained(out)
    return {"batch": arguments.per_device_train_batch_size, "lr": arguments.learning_rate}


def judge(model: str, questions: str, adapter: str) -> float:
    """The mean loss of answers, in float32."""
    tokenizer = tokenizer_of(model)
    network: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter:
        from peft import PeftModel

        network = PeftModel.from_pretrained(network, adapter)
    total, count = 0.0, 0
    for messages in read(questions):
        ids, at = encoded(tokenizer, messages)
        with torch.no_grad():
            logits = network(torch.tensor([ids])).logits[0, at - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[at:]), reduction="sum"))
        count += len(ids) - at
    return total / count


def main() -> None:
    name, *words = sys.argv[1:]
    if name == "judge":
        print(judge(*words))
        return
    model, data, out, seconds = words
    clock = Clock(float(seconds))
    settings = {"peft": peft, "trl": trl}[name](model, data, out, clock)
    tokens = sum(len(encoded(tokenizer_of(model), messages)[0]) for messages in read(data))
    batches = -(-len(read(data)) // int(settings["batch"]))
    record = settings | {"steps": clock.steps, "training_s": round(clock.seconds, 1)}
    record["tokens_per_s"] = round(tokens / batches * clock.steps / clock.seconds, 1)
    Path(out).mkdir(exist_ok=True)
    (Path(out) / "run.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
