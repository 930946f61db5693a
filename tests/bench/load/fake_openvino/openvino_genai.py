"""What `bench/peers/openvino_server.py` uses of openvino_genai, over characters: a step gives each answer the next
character of its prompt, beginning again at the prompt's end. Token ids are the bytes of UTF-8; 0 ends an answer."""

import os
import time
from enum import Enum
from types import SimpleNamespace

import numpy as np

GenerationStatus = Enum("GenerationStatus", "RUNNING FINISHED IGNORED CANCEL STOP")
GenerationFinishReason = Enum("GenerationFinishReason", "NONE STOP LENGTH")


class SchedulerConfig:
    def __init__(self):
        self.max_num_batched_tokens, self.max_num_seqs, self.cache_size = 256, 256, 0
        self.enable_prefix_caching = False
        self.cache_eviction_config = object()


class GenerationConfig:
    def __init__(self, ending=False):
        self.ending, self.ignore_eos, self.do_sample, self.max_new_tokens = ending, False, True, 1


class Tokenizer:
    def encode(self, text, add_special_tokens):
        ids = [1] * add_special_tokens + list(text.encode())
        return SimpleNamespace(input_ids=SimpleNamespace(data=np.array([ids]), shape=[1, len(ids)]))

    def decode(self, ids):
        return bytes(each for each in ids if each > 1).decode("utf-8", "replace")

    def apply_chat_template(self, messages, add_generation_prompt):
        assert add_generation_prompt
        return "<" + "|".join(message["content"] for message in messages) + ">"


class Handle:
    def __init__(self, prompt, config):
        self.prompt, self.config, self.computed, self.queue = prompt, config, 0, []
        self.status = GenerationStatus.RUNNING

    def next(self):
        """Compute a token."""
        token = 0 if self.config.ending and self.computed == 2 else self.prompt[self.computed % len(self.prompt)]
        self.computed += 1
        stops = token == 0 and not self.config.ignore_eos
        over = stops or self.computed == self.config.max_new_tokens
        reason = "STOP" if stops else "LENGTH" if over else "NONE"
        self.queue.append({0: SimpleNamespace(generated_ids=[token], finish_reason=GenerationFinishReason[reason])})
        self.status = GenerationStatus.FINISHED if over else self.status

    def can_read(self):
        return bool(self.queue)

    def read(self):
        return self.queue.pop(0)

    def get_status(self):
        return self.status

    def cancel(self):
        self.status = GenerationStatus.CANCEL


class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, properties):
        if device == "NPU":
            raise RuntimeError("no device NPU")
        self.scheduler, self.handles = scheduler, []
        self.log = os.path.join(model, "log")
        self.tell(f"{device} {properties} {scheduler.max_num_seqs} {scheduler.enable_prefix_caching}")

    def tell(self, line):
        with open(self.log, "a") as log:
            log.write(f"{line}\n")

    def get_tokenizer(self):
        return Tokenizer()

    def get_config(self):
        return GenerationConfig(ending=True)

    def add_request(self, number, ids, config):
        handle = Handle(ids.data[0].tolist(), config)
        if len(handle.prompt) > 100:
            handle.status = GenerationStatus.IGNORED
        if b"crash" in bytes(handle.prompt):
            raise RuntimeError("the fake does not like this prompt")
        self.handles.append(handle)
        return handle

    def step(self):
        running = [each for each in self.handles if each.status is GenerationStatus.RUNNING]
        self.handles = running[: self.scheduler.max_num_seqs]
        self.tell(f"step {len(running)}")
        time.sleep(0.002)
        for each in self.handles:
            each.next()
