"""OpenAI's API: chat completions and completions."""
