"""Files <-> tensors: GGUF, safetensors, names, and where models come from."""
