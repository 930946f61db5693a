"""The API of Hugging Face's Text Generation Inference: /generate, /generate_stream, /info."""
