"""The GPUs of this host, and what keeps them from being used."""
