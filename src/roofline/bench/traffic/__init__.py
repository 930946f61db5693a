"""Traffic: which requests a load test sends, as files whose bytes are the same on every machine."""
