"""The command line of the benchmarks: `lora-jax bench BENCHMARK`.

A benchmark is a module of this folder, named in BENCHMARKS, which must not import jax when it is imported:
    HELP, DESCRIPTION                 for --help
    add_arguments(parser)             its options, those of the engine included if it makes one
    run(options, show=print) -> dict  measures, shows lines for people, returns plain data for the JSON line; one that takes
                                      minutes hands what it has so far to options.keep, should that exist
    chart(result) -> list[Panel]      what --plot draws (see `plot`)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError
from . import kernels, latency, overhead, plot, report, serve, throughput

BENCHMARKS: dict[str, ModuleType] = {
    "latency": latency,
    "overhead": overhead,
    "throughput": throughput,
    "kernels": kernels,
    "serve": serve,
}


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    """Gives `parser` one subcommand a benchmark; the parsed namespace's `benchmark` names it."""
    subcommands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, module in BENCHMARKS.items():
        command = subcommands.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        module.add_arguments(command)
        group = command.add_argument_group("output")
        group.add_argument("--json", metavar="FILE", help="also write the closing JSON line to this file")
        group.add_argument("--plot", metavar="FILE", help="draw the result: .png, .svg or .pdf (extra 'bench')")
    command = subcommands.add_parser("plot", help="draw a result that --json kept, as --plot would have")
    command.add_argument("result", metavar="RESULT.json")
    command.add_argument("figure", metavar="FIGURE", help=".png, .svg or .pdf (extra 'bench')")


def run(options: argparse.Namespace) -> int:
    """Runs the chosen benchmark; its result is the last line of the output, as JSON. Returns the exit code.

    Raises: LoraJaxError.
    """
    if options.benchmark == "plot":
        return _plot(options.result, options.figure)
    module = BENCHMARKS[options.benchmark]
    for path in (options.json, options.plot):  # not after minutes of measuring
        if path is not None:
            _check_writable(path)
    if options.plot:
        plot.check(options.plot)

    saved: dict[str, bool] = {}  # of each file whether it holds the last that was to be written

    def save(path: str, write: Callable[[], None]) -> None:
        """A file that could be written before and cannot now takes no measurement with it."""
        try:
            write()
            saved[path] = True
        except OSError as e:
            print(f"error: {path} cannot be written: {e.strerror or e}", file=sys.stderr)
            saved[path] = False

    def keep(found: dict[str, Any]) -> dict[str, Any]:
        result = {"benchmark": options.benchmark, **found, **report.describe(options)}
        if options.json:
            save(options.json, lambda: _write(Path(options.json).resolve(), json.dumps(result) + "\n"))
        return result

    options.keep = keep
    result = keep(module.run(options))
    print(json.dumps(result))
    if options.plot:
        save(options.plot, lambda: plot.save(options.plot, module.chart(result), result))
    return 0 if all(saved.values()) else 1


def _plot(kept: str, figure: str) -> int:
    """Raises: ConfigError."""
    _check_writable(figure)
    plot.check(figure)
    try:
        result = json.loads(Path(kept).read_text())
        module = BENCHMARKS[result["benchmark"]]
    except OSError as e:
        raise ConfigError(f"{kept} cannot be read: {e.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{kept} is no result of one of {', '.join(BENCHMARKS)}") from None
    try:
        panels = module.chart(result)
        for key in ("versions", "command", "date"):  # the figure's foot
            result[key]
    except KeyError as e:
        raise ConfigError(
            f"{kept} was written by an older version of lora-jax bench {result['benchmark']}: it has no {e}; measure again"
        ) from None
    plot.save(figure, panels, result)
    return 0


def _write(path: Path, text: str) -> None:
    """An interrupt in the middle leaves what a file held before. What is no file, such as /dev/stdout, is written to."""
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def _check_writable(path: str) -> None:
    """Raises: ConfigError."""
    folder = Path(path).absolute().parent
    if not path or Path(path).is_dir():
        raise ConfigError(f"{path!r} is no name of a file to write to")
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: {folder} is no folder")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")
