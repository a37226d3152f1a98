#!/usr/bin/env python3
"""`lora-jax bench` without the installed command: scripts/bench.py latency [options]."""

from __future__ import annotations

import sys

from lora_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
