"""What a run reads: which samples each global batch holds, the shards they lie in, and the receipts that prove it."""
