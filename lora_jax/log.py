"""The package's logger: what an engine says about itself at start is meant to be seen. Host only."""

from __future__ import annotations

import logging

log = logging.getLogger("lora_jax")


def show_log() -> None:
    """Send messages from INFO on to standard error, unless the program has set up logging itself."""
    if log.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("lora_jax: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
