"""Published charts, digitised with their sources, beside what this machine measures and what the roofs allow."""
