#!/usr/bin/env python3
"""`lora-jax serve` without the installed command: scripts/serve.py MODEL [options]."""

from __future__ import annotations

import sys

from lora_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
