"""What a fleet measures: every replica's /metrics read, summed, served at one address, and written down."""
