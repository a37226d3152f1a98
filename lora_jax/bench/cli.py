"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import LoraJaxError

DESCRIPTION = "Measurements that anyone can repeat. Each ends with its result as one JSON line."


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    """Gives `parser` one subcommand a benchmark; the parsed namespace's `benchmark` names it."""
    from ..cli_args import add_engine_arguments
    from . import latency

    subcommands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    command = subcommands.add_parser(
        "latency",
        help="one batch from prompt to last token",
        description="Time one batch of equal prompts from start to last token, many times over, and compare with the "
        "bytes that each decode step has to read.",
    )
    add_engine_arguments(command)
    latency.add_arguments(command)


def run(options: argparse.Namespace) -> int:
    """Runs the chosen benchmark. The last line of the output is its result as JSON. Returns the exit status."""
    from . import latency

    result = {"latency": latency.run}[options.benchmark](options)
    line = json.dumps(result)
    if options.json:
        Path(options.json).write_text(line + "\n")
    print(line)
    return 0


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """`scripts/bench.py`: the same as `lora-jax bench`."""
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION)
    add_subcommands(parser)
    try:
        return run(parser.parse_args(argv))
    except LoraJaxError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
