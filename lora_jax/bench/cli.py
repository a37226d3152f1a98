"""The command line of the benchmarks: `lora-jax bench BENCHMARK`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..cli_args import add_engine_arguments
from . import latency


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    """Gives `parser` one subcommand a benchmark; the parsed namespace's `benchmark` names it."""
    subcommands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    command = subcommands.add_parser(
        "latency",
        help="one batch from prompt to last token",
        description="Time one batch of equal prompts from start to last token, many times over, and compare with the "
        "bytes that each decode step has to read.",
    )
    latency.add_arguments(command)
    add_engine_arguments(command)


def run(options: argparse.Namespace) -> int:
    """Runs the chosen benchmark; its result is the last line of the output, as JSON. Returns the exit code.

    Raises: LoraJaxError.
    """
    result = {"latency": latency.run}[options.benchmark](options)
    line = json.dumps(result)
    if options.json:
        Path(options.json).write_text(line + "\n")
    print(line)
    return 0
