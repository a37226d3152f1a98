"""The command `lora-jax`: `serve` and `bench`. What a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import __version__
from .cli_args import OptionParser, add_engine_arguments, add_options, build, engine_args_from, lora_module, model_of
from .config import EngineArgs
from .errors import ConfigError, LoraJaxError
from .server.options import ServerArgs

DEMO = "demo"  # the model name that stands for the demo's own model and adapters
INTERRUPTED = 130  # as shells report SIGINT
SERVE_PACKAGES = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code: 2 for wrong options, 1 for what failed later, 130 after an interrupt."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(args)
    except ConfigError as exc:
        return _fail(exc, 2)
    except LoraJaxError as exc:
        return _fail(exc, 1)
    except KeyboardInterrupt:
        # Behind a progress bar, or the terminal's ^C.
        print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """`main` as a process. An interrupted one ends at once: leaving the normal way would wait for threads, and a second
    interrupt of that wait prints a traceback."""
    code = main(argv)
    if code == INTERRUPTED:
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _fail(exc: Exception, code: int) -> int:
    print(f"lora-jax: error: {exc}", file=sys.stderr, flush=True)
    return code


def _run(argv: list[str]) -> int:
    parser = OptionParser(prog="lora-jax", description="Serve many LoRA adapters on one base model.")
    parser.add_argument("--version", action="version", version=f"lora-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{serve,bench}", parser_class=OptionParser)
    serve_parser = commands.add_parser("serve", help="an OpenAI-compatible server")
    bench_parser = commands.add_parser("bench", help="measure latency and the cost of adapters")
    command = next((a for a in argv if not a.startswith("-")), None)
    if command == "bench":
        bench = importlib.import_module("lora_jax.bench.cli")
        bench.add_subcommands(bench_parser)
        options = parser.parse_all(argv)
        options.argv = tuple(argv)  # a result tells how it was made
        models = {getattr(options, "model_tag", None), getattr(options, "model", None)}
        if DEMO in models and model_of(options) == DEMO:
            assets = importlib.import_module("lora_jax.demo.assets").prepare()
            options.model_tag, options.model = None, assets.model_path
        return bench.run(options)
    add_options(serve_parser.add_argument_group("server"), ServerArgs)
    add_engine_arguments(serve_parser)
    return serve(parser.parse_all(argv))


def serve(options: argparse.Namespace) -> int:
    """`lora-jax serve`. Raises: LoraJaxError."""
    server, engine = serve_args(options)
    for name in SERVE_PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as exc:
            raise LoraJaxError(
                f"the server needs the package {exc.name}: install the extra 'serve', in a checkout pip install -e '.[serve]'"
            ) from None
    from .server import launch

    return launch.serve(engine, server)


def serve_args(options: argparse.Namespace) -> tuple[ServerArgs, EngineArgs]:
    """Both halves of the options, checked. The model `demo` stands for the demo's files and, where none are given, its sizes.

    Raises: ConfigError.
    """
    server = build(ServerArgs, options)
    more: dict[str, Any] = {"enable_lora": True} if server.enable_runtime_lora_updating else {}
    if model_of(options) == DEMO:
        demo = importlib.import_module("lora_jax.demo.assets")
        assets = demo.prepare()
        shipped = [f"{name}={path}" for name, path in assets.lora_modules.items()]
        more["lora_modules"] = (*shipped, *map(lora_module, options.lora_modules))
        more["model"] = assets.model_path
        more |= {name: size for name, size in demo.SIZES.items() if getattr(options, name) is None}
        server = dataclasses.replace(server, served_model_name=server.served_model_name or (DEMO,))
    engine = engine_args_from(options, **more)
    server.names(engine)  # refuses clashing names before anything is loaded
    return server, engine


if __name__ == "__main__":
    command()
