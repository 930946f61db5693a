"""Ollama's API: /api/chat, /api/generate, and what it says of models."""
