"""ids -> ids: scheduler, paged KV cache, step, engines local and remote."""
