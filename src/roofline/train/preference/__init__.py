"""Preference and reward on the training loop: DPO on pairs of answers, GRPO on answers that are sampled."""
