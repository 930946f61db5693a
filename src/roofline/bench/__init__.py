"""Roofs, workloads, figures."""
