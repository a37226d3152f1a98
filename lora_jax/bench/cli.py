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
    for path in filter(None, (options.json, options.plot)):  # not after minutes of measuring
        _check_folder(path)
    if options.plot:
        plot.check(options.plot)

    def keep(result: dict[str, Any]) -> dict[str, Any]:
        result = {"benchmark": options.benchmark, **result, **report.describe(options)}
        if options.json:
            _write(Path(options.json).resolve(), json.dumps(result) + "\n")
        return result

    options.keep = keep
    result = keep(module.run(options))
    if options.plot:
        plot.save(options.plot, module.chart(result), result)
    print(json.dumps(result))
    return 0


def _plot(kept: str, figure: str) -> int:
    """Raises: ConfigError."""
    _check_folder(figure)
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


def _check_folder(path: str) -> None:
    """Raises: ConfigError."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: {folder} is no folder")
