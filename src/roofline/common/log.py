"""Logging: one logger per room, to stderr, configured only by programs (never by import)."""

import logging

from roofline.common import env


def get(room: str) -> logging.Logger:
    """The logger of a room, e.g. ``get("engine")``."""
    return logging.getLogger(f"roofline.{room}")


def configure(default: str = "warning") -> None:
    """Send roofline's log lines to stderr at ROOFLINE_LOG's level. Called by programs only."""
    level = (env.read("ROOFLINE_LOG") or default).upper()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("roofline")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
