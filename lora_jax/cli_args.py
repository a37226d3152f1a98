"""From frozen dataclasses of options to a command line, and back. Host only.

Every field is an option: its name, type, default and help are the field's own, so nothing is written twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import types
import typing
from typing import Any, Literal, NoReturn, TypeVar

from .config import EngineArgs
from .errors import ConfigError

T = TypeVar("T")

# Options of `vllm serve` that do not exist here -> what to do instead.
VLLM_ONLY: dict[str, str] = {
    "block-size": "use --page-size",
    "num-gpu-blocks-override": "use --num-pages",
    "enforce-eager": "use --no-enable-command-buffers",
    "disable-log-requests": "use --disable-uvicorn-access-log",
    "enable-log-requests": "the access log is on by default",
    "no-enable-log-requests": "use --disable-uvicorn-access-log",
    "use-tqdm-on-load": "progress bars are on; --disable-tqdm turns them off",
    "max-num-partial-prefills": "leave it out: prompts are cut to --max-num-batched-tokens",
    "enable-chunked-prefill": "leave it out: prompts are always cut to --max-num-batched-tokens",
    "no-enable-chunked-prefill": "leave it out: prompts are always cut to --max-num-batched-tokens",
    "trust-remote-code": "leave it out: code that comes with a checkpoint is never run",
    "lora-dtype": "leave it out: adapters are cast to the model's dtype",
    **dict.fromkeys(
        "additional-config allow-credentials allowed-headers allowed-local-media-path allowed-methods "
        "allowed-origins api-server-count async-scheduling attention-backend chat-template "
        "chat-template-content-format code-revision collect-detailed-traces compilation-config config "
        "config-format cpu-offload-gb cuda-graph-sizes data-parallel-size data-parallel-backend "
        "decode-context-parallel-size default-mm-loras disable-cascade-attn disable-custom-all-reduce "
        "disable-fastapi-docs disable-hybrid-kv-cache-manager disable-log-stats disable-sliding-window "
        "distributed-executor-backend download-dir enable-auto-tool-choice enable-expert-parallel enable-lora-bias "
        "enable-prompt-embeds enable-prompt-tokens-details enable-request-id-headers "
        "enable-server-load-tracking enable-sleep-mode enable-ssl-refresh fully-sharded-loras generation-config "
        "guided-decoding-backend h11-max-header-count headless hf-config-path hf-overrides hf-token "
        "ignore-patterns kv-cache-dtype kv-cache-memory-bytes kv-events-config kv-transfer-config "
        "limit-mm-per-prompt load-config logits-processors logprobs-mode lora-extra-vocab-size "
        "max-cudagraph-capture-size max-log-len max-long-partial-prefills max-seq-len-to-capture middleware "
        "mm-processor-kwargs model-impl model-loader-extra-config multi-step-stream "
        "num-scheduler-steps otlp-traces-endpoint override-attention-dtype override-generation-config "
        "pipeline-parallel-size preemption-mode prefix-caching-hash-algo pt-load-map-location quantization "
        "reasoning-parser response-role return-tokens-as-token-ids root-path runner scheduler-cls "
        "scheduling-policy skip-tokenizer-init speculative-config ssl-ca-certs ssl-cert-reqs ssl-certfile "
        "ssl-keyfile structured-outputs-config swap-space task tokenizer-mode tokenizer-revision tool-call-parser "
        "tool-parser-plugin tool-server uds worker-cls worker-extension-cls".split(),
        "leave it out",
    ),
}


class OptionParser(argparse.ArgumentParser):
    """Fails with ConfigError instead of printing its usage; takes --max_loras for --max-loras, no abbreviations."""

    def __init__(self, *args: Any, **kw: Any):
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **kw})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as exc:  # a list takes what follows it, the model's name too
            takes_model = any(a.dest == "model_tag" for a in self._actions)
            if takes_model and action.nargs == "+" and not arg_string.lstrip("-").isdigit():
                exc.message += (
                    f" (if {arg_string} is the model: it goes before the options, or as --model {arg_string})"
                )
            raise

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(None if args is None else [_dashed(a) for a in args], namespace)

    def parse_all(self, argv: list[str]) -> argparse.Namespace:
        """Raises: ConfigError; an unknown option comes with the nearest known one or with vLLM's story."""
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            raise ConfigError(explain_unknown(unknown[0], _flags(self)))
        return namespace


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    out: list[str] = []
    for action in parser._actions:
        out += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                out += _flags(child)
    return out


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, (), argparse.SUPPRESS) or "(default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def _dashed(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else arg


def explain_unknown(option: str, known: list[str]) -> str:
    """One sentence on an option, or stray argument, that no parser took."""
    name = option.partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {option!r}"
    advice = VLLM_ONLY.get(name.lstrip("-").replace("_", "-"))
    if advice is not None:
        return f"{name} is an option of vLLM that lora_jax does not have: {advice}"
    close = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    return f"unknown option {name}" + (f"; did you mean {close[0]}?" if close else "")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, as argument or as --model, and one option a field of EngineArgs."""
    text = EngineArgs.__dataclass_fields__["model"].metadata["help"]
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("--model", metavar="MODEL", help="the same as an option")
    add_options(parser.add_argument_group("engine"), EngineArgs)


def model_of(options: argparse.Namespace) -> str:
    """Raises: ConfigError when no model is named, or two."""
    if options.model is not None and options.model_tag is not None and options.model != options.model_tag:
        raise ConfigError(f"two models are named: {options.model_tag} and --model {options.model}")
    model = options.model_tag if options.model is None else options.model
    if model is None:
        raise ConfigError("no model is named: give a Hugging Face directory or a hub id as the first argument")
    return model


def engine_args_from(options: argparse.Namespace, **more: Any) -> EngineArgs:
    """What `add_engine_arguments` took; `more` wins. Raises: ConfigError naming the option."""
    modules = tuple(lora_module(item) for item in options.lora_modules)
    return build(EngineArgs, options, **{"model": model_of(options), "lora_modules": modules, **more})


def lora_module(text: str) -> str:
    """name=path, from that form or from vLLM's JSON form. Raises: ConfigError."""
    name, equals, path = text.partition("=")
    if text.lstrip().startswith("{"):
        name, path, equals = *_from_json(text), "="
    if not equals or not name or not path:
        raise ConfigError(f"lora_modules: {text!r} is not name=path")
    if "=" in name:
        raise ConfigError(f"lora_modules: the name {name!r} must not hold '='")
    return f"{name}={path}"


def _from_json(text: str) -> tuple[str, str]:
    try:
        entry = json.loads(text)
        name, path = entry["name"], entry["path"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f'lora_modules: {text!r} is not {{"name": ..., "path": ...}}') from None
    unknown = sorted(set(entry) - {"name", "path", "base_model_name"})
    if unknown or not isinstance(name, str) or not isinstance(path, str):
        wrong = f"unknown field {unknown[0]!r}" if unknown else "name and path must be strings"
        raise ConfigError(f"lora_modules: {text!r}: {wrong}")
    return name, path


def add_options(parser: argparse._ActionsContainer, cls: type) -> None:
    """One option a field of the dataclass. Fields with metadata positional=True are left to the caller."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if not f.metadata.get("positional"):
            _add(parser, f"--{f.name.replace('_', '-')}", f, hints[f.name])


def _add(parser: argparse._ActionsContainer, flag: str, f: dataclasses.Field, hint: Any) -> None:
    kw: dict[str, Any] = {"dest": f.name, "default": f.default, "help": f.metadata["help"].replace("%", "%%")}
    options = [a for a in typing.get_args(hint) if a is not type(None)] if _is_union(hint) else [hint]
    if bool in options:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **kw)
    elif any(typing.get_origin(o) is tuple for o in options):
        parser.add_argument(flag, nargs="+", action=_Extend, metavar=f.metadata.get("metavar", "NAME"), **kw)
    elif typing.get_origin(options[0]) is Literal:
        parser.add_argument(flag, choices=typing.get_args(options[0]), **kw)
    else:
        parser.add_argument(flag, type=_converter(options), metavar=_metavar(options), **kw)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _metavar(options: list[Any]) -> str:
    names = {int: "N", float: "X", str: "TEXT"}
    return "|".join("|".join(typing.get_args(o)) if typing.get_origin(o) is Literal else names[o] for o in options)


def _converter(options: list[Any]) -> Any:
    """argparse's type=: the words of a Literal as they are, else the first plain type."""
    words = [word for o in options if typing.get_origin(o) is Literal for word in typing.get_args(o)]
    kind = next(o for o in options if typing.get_origin(o) is None)

    def convert(text: str) -> Any:
        return text if text in words else kind(text)

    convert.__name__ = " or ".join([kind.__name__, *words])  # argparse names it in errors
    return convert


class _Extend(argparse.Action):
    """Repeating a list option adds to it; the default is not part of the list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (() if before is self.default else before) + tuple(values))


def build(cls: type[T], namespace: argparse.Namespace, **more: Any) -> T:
    """The dataclass from parsed options; `more` wins. Raises whatever the dataclass raises, ConfigError mostly."""
    values = {f.name: getattr(namespace, f.name) for f in dataclasses.fields(cls) if hasattr(namespace, f.name)}  # type: ignore[arg-type]
    return cls(**{**values, **more})
