"""Whether two training runs are the same run: statistics, findings, verdict and pictures."""
