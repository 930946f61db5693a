"""Prefill and decode latency for combinations of techniques."""
