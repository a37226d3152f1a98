#!/usr/bin/env python3
"""`lora-jax bench` without the installed command: scripts/bench.py latency [options]."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, installed or not

try:
    from lora_jax.cli import command
except ModuleNotFoundError as error:
    sys.exit(f"{error}: run this with the environment that holds the dependencies, such as .venv/bin/python")

if __name__ == "__main__":
    command(["bench", *sys.argv[1:]])
