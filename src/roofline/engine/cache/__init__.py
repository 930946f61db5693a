"""The paged KV cache, and the naive one that tests compare it with."""
