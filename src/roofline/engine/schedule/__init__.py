"""Which tokens the next step computes: schedulers, sequences, and the buffer that a plan becomes."""
