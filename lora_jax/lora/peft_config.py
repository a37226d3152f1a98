"""What adapter_config.json means, and which of its fields change the maths. Host only: never imports jax.

Every field of PEFT's LoraConfig up to 0.21 stands in exactly one of SUPPORTED, HARMLESS and MUST_BE_OFF. A field that
is in none of them belongs to another version of PEFT: it is accepted while it is off.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Any

from ..errors import AdapterError
from .patterns import Pattern, Stopwatch, compile_all

SUPPORTED = frozenset(
    "peft_type task_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules "
    "layers_to_transform layers_pattern bias init_lora_weights ensure_weight_tying velora_config runtime_config".split()
)

# Where an adapter came from, how it was trained or initialised, how PEFT runs it: nothing that inference shows.
# fan_in_fan_out: PEFT itself ignores it for nn.Linear. *_config of initialisations: the values lie in the tensors, the
# initialisations that take something out of the base are refused by init_lora_weights.
HARMLESS = frozenset(
    "auto_mapping base_model_name_or_path peft_version revision inference_mode lora_dropout fan_in_fan_out eva_config "
    "corda_config lora_ga_config loftq_config megatron_core qalora_group_size merge_weights".split()
)

MUST_BE_OFF = {
    "use_dora": "DoRA rescales every output row of the base weight; merge it with PEFT, or train without DoRA",
    "lora_bias": "it adds a bias to lora_B",
    "modules_to_save": "it replaces whole modules of the base; train them with LoRA instead (target_modules)",
    "target_parameters": "it adapts parameters instead of modules",
    "trainable_token_indices": "it replaces rows of the embedding",
    "alora_invocation_tokens": "activated LoRA applies to a part of the prompt only",
    "layer_replication": "it changes the depth of the base",
    "megatron_config": "it was made for Megatron's parallel layers",
    "use_qalora": "QALoRA pools the inputs of lora_A",
    "use_bdlora": "BD-LoRA stores block-diagonal matrices",
    "arrow_config": "Arrow routes every token to other adapters",
    "kasa_config": "KaSA truncates the base weights and adds a diagonal",
    "monteclora_config": "MonteCLoRA samples its weights",
    "enable_lora": "it adapts parts of fused layers, as PEFT before 0.3 did",
}

_KNOWN = SUPPORTED | HARMLESS | MUST_BE_OFF.keys()

_PLAIN_INITS = {"gaussian", "orthogonal", "eva", "mica", "true", "false"}
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")


def _refuse(field: str, value: Any, why: str) -> AdapterError:
    text = repr(value)
    return AdapterError(
        f"adapter_config.json: {field}={text if len(text) < 120 else text[:117] + '...'} is not supported: {why}"
    )


@dataclass(frozen=True)
class PeftConfig:
    """The part of a LoRA configuration that decides the maths. Patterns in the file's order: the first match counts."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[Pattern, int], ...]
    alpha_pattern: tuple[tuple[Pattern, float], ...]
    target_modules: Pattern | frozenset[str] | None
    all_linear: bool
    exclude_modules: Pattern | frozenset[str] | None
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[Pattern, ...]
    ensure_weight_tying: bool
    velora: bool

    def ranks(self, module: str) -> tuple[int, ...]:
        """Ranks that the configuration allows a module (its name as in training): one, unless rank_pattern overlaps.

        PEFT takes the first match and then saves the keys sorted: which one it was, only the tensor still knows.
        """
        return tuple(v for p, v in self.rank_pattern if p.match(module)) or (self.r,)

    def scale(self, module: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        alpha = next((v for p, v in self.alpha_pattern if p.match(module)), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str, *, all_linear_holds: bool) -> bool:
        """Whether PEFT would adapt `module`. all_linear_holds: the module is one that "all-linear" means."""
        if self.exclude_modules is not None and _named(self.exclude_modules, module):
            return False
        if self.all_linear:
            return all_linear_holds
        if self.target_modules is None:
            return True
        if isinstance(self.target_modules, Pattern) or module in self.target_modules:
            return _named(self.target_modules, module)
        return _named(self.target_modules, module) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        match = next((m for p in self.layers_pattern if (m := p.match(module))), None)
        return match is not None and int(match["idx"]) in self.layers_to_transform


def _named(spec: Pattern | frozenset[str], module: str) -> bool:
    if isinstance(spec, Pattern):
        return spec.fullmatch(module) is not None
    parts = module.split(".")
    return any(".".join(parts[i:]) in spec for i in range(len(parts)))


def parse_config(data: dict[str, Any]) -> PeftConfig:
    """Checks every field of adapter_config.json.

    Raises: AdapterError naming the first field that would change the result and is not supported, or is malformed.
    """
    _check_kind(data)
    for field, value in data.items():
        if field in MUST_BE_OFF and value:  # an empty list or object is off, any other object is on, as in PEFT
            raise _refuse(field, value, MUST_BE_OFF[field])
        if field not in _KNOWN and value:
            raise _refuse(field, value, "this field is unknown and switched on, so it may change the result")
    _check_init(data.get("init_lora_weights"))
    runtime = data.get("runtime_config") or {}
    if not isinstance(runtime, dict) or any(v for k, v in runtime.items() if k != "ephemeral_gpu_offload"):
        raise _refuse("runtime_config", runtime, "only ephemeral_gpu_offload is known there")
    targets = data.get("target_modules")
    if isinstance(targets, str) and _layers(data.get("layers_to_transform")) is not None:
        raise _refuse(
            "layers_to_transform", data["layers_to_transform"], "PEFT knows it with a list of target_modules only"
        )
    all_linear = isinstance(targets, str) and targets.lower() == "all-linear"
    watch = Stopwatch()
    return PeftConfig(
        r=_rank("r", data.get("r", 8)),
        lora_alpha=_alpha("lora_alpha", data.get("lora_alpha", 8)),
        use_rslora=_flag(data, "use_rslora"),
        rank_pattern=_patterns(data, "rank_pattern", _rank, watch),
        alpha_pattern=_patterns(data, "alpha_pattern", _alpha, watch),
        target_modules=None if all_linear else _module_spec("target_modules", targets, watch),
        all_linear=all_linear,
        exclude_modules=_module_spec("exclude_modules", data.get("exclude_modules") or None, watch),
        layers_to_transform=_layers(data.get("layers_to_transform")),
        layers_pattern=_layers_patterns(data.get("layers_pattern"), watch),
        ensure_weight_tying=_flag(data, "ensure_weight_tying"),
        velora=bool(data.get("velora_config")),
    )


def _check_kind(data: dict[str, Any]) -> None:
    if data.get("peft_type") is None:
        raise AdapterError("adapter_config.json has no peft_type: set it to LORA if the tensors are plain LoRA")
    if data["peft_type"] != "LORA":
        raise _refuse("peft_type", data["peft_type"], "only LORA adapters can be served")
    if data.get("task_type") not in (None, "CAUSAL_LM"):
        raise _refuse("task_type", data["task_type"], "only CAUSAL_LM adapters can be served")
    if data.get("bias") not in (None, "none", "lora_only", "all"):
        raise _refuse("bias", data["bias"], "use none")


def _check_init(value: Any) -> None:
    if value is None or isinstance(value, bool):
        return
    name = value.lower() if isinstance(value, str) else ""
    if name.startswith(_BASE_CHANGING_INITS):
        why = (
            "it takes the initial B @ A out of the base weights, so adding the adapter to the plain base is wrong; "
            "save it with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
        raise _refuse("init_lora_weights", value, why)
    if name not in _PLAIN_INITS:
        raise _refuse("init_lora_weights", value, "this initialisation is unknown and may change the base weights")


def _flag(data: dict[str, Any], field: str) -> bool:
    value = data.get(field)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"adapter_config.json: {field} must be true or false, got {reprlib.repr(value)}")
    return bool(value)


def _rank(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(f"adapter_config.json: {field} must be an integer >= 1, got {reprlib.repr(value)}")
    return value


def _alpha(field: str, value: Any) -> float:
    try:
        alpha = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        alpha = math.inf
    if not math.isfinite(alpha):
        raise AdapterError(f"adapter_config.json: {field} must be a finite number, got {reprlib.repr(value)}")
    return alpha


def _patterns(data: dict[str, Any], field: str, check: Any, watch: Stopwatch) -> tuple[tuple[Pattern, Any], ...]:
    value = data.get(field) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"adapter_config.json: {field} must map names to numbers, got {reprlib.repr(value)}")
    # PEFT's rule: the key is a regular expression for the whole name, or for its end after a dot
    patterns = compile_all(field, list(value), watch, r"(.*\.)?({})$")
    return tuple((p, check(f"{field}[{k!r}]", v)) for p, (k, v) in zip(patterns, value.items(), strict=True))


def _strings(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise AdapterError(
            f"adapter_config.json: {field} must be a string or a list of strings, got {reprlib.repr(value)}"
        )
    return tuple(value)


def _module_spec(field: str, value: Any, watch: Stopwatch) -> Pattern | frozenset[str] | None:
    if value is None:
        return None
    return compile_all(field, [value], watch)[0] if isinstance(value, str) else frozenset(_strings(field, value))


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) for v in layers):
        raise AdapterError(f"adapter_config.json: layers_to_transform must be layer numbers, got {reprlib.repr(value)}")
    return frozenset(layers)


def _layers_patterns(value: Any, watch: Stopwatch) -> tuple[Pattern, ...]:
    names = (value,) if isinstance(value, str) else _strings("layers_pattern", value) if value else ()
    if not names:
        return compile_all("layers_pattern", [r".*?\.[^.]*\.(?P<idx>\d+)\."], watch)
    return compile_all("layers_pattern", names, watch, r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")
