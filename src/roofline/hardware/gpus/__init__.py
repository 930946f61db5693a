"""The GPUs of this host: which there are, and what keeps them from being used."""
