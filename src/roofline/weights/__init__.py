"""Reads and writes model files (GGUF, safetensors, config.json), and finds or downloads them."""
