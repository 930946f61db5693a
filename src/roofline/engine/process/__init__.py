"""Engines in processes of their own: messages, the process itself, its owner, and replicas."""
