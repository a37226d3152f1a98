#!/usr/bin/env python3
"""The same as `lora-jax bench`: `python scripts/bench.py latency --help`."""

import sys

from lora_jax.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
