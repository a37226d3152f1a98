"""From what a user calls a model to the folder that holds it. Host only; the hub is asked where no folder is."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ModelLoadError
from .fields import read_json

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"]


def resolve_model(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of a checkpoint: `model` itself, or the hub's snapshot of that id at `revision`.

    weights=False asks for the configuration alone (load_format="dummy").
    Raises: ModelLoadError for a file, an adapter folder, a folder without safetensors weights, an unreachable hub id.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ModelLoadError(
                f"revision={revision!r} only applies to hub ids, and {model!r} is a local folder: leave it out"
            )
    elif path.exists():
        kind = "a GGUF file, which is not supported" if path.suffix == ".gguf" else "a file"
        raise ModelLoadError(
            f"{model!r} is {kind}: give the folder of a Hugging Face checkpoint (config.json, *.safetensors)"
        )
    elif _HUB_ID.fullmatch(model):
        path = _download(model, revision, weights)
    else:
        raise ModelLoadError(
            f"no folder {model!r}: give the folder of a Hugging Face checkpoint or a hub id (owner/name)"
        )
    _check_folder(path, model, weights)
    return path


def _check_folder(path: Path, model: str, weights: bool) -> None:
    names = sorted(p.name for p in path.iterdir())
    has_weights = any(n == "model.safetensors" or n == "model.safetensors.index.json" for n in names)
    if "adapter_config.json" in names and ("config.json" not in names or (weights and not has_weights)):
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        raise ModelLoadError(
            f"{model!r} is an adapter, not a base model: "
            f"serve {base!r} and pass the adapter as --lora-modules NAME={model}"
        )
    if "config.json" not in names or (weights and not has_weights):
        problem = (
            "no config.json" if "config.json" not in names else "no model.safetensors or model.safetensors.index.json"
        )
        raise ModelLoadError(f"{model!r} has {problem}: {_advice(names)}")


def _advice(names: list[str]) -> str:
    """What to do about a folder without safetensors weights, from what it has instead."""

    def ends(*suffixes: str) -> list[str]:
        return [n for n in names if n.endswith(suffixes)]

    if other := ends(".safetensors"):
        if any(n.startswith("consolidated") for n in other):
            return f"{other[0]} is in another format: convert it to a Hugging Face checkpoint"
        return f"it holds {', '.join(other[:3])} and no index that lists them: download the checkpoint again"
    if gguf := ends(".gguf"):
        return f"GGUF files ({gguf[0]}) are not supported: get the original Hugging Face checkpoint"
    if torch_files := ends(".bin", ".pth", ".pt"):
        return f"{torch_files[0]} is a pickle, which is not loaded: convert it with save_pretrained(safe_serialization=True)"
    return "give the folder of a complete Hugging Face checkpoint (config.json and safetensors weights)"


def _download(model: str, revision: str | None, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelLoadError(
            f"no folder {model!r}, and huggingface_hub, which would look it up, is not installed"
        ) from None
    patterns = [*_SMALL_FILES, "model*.safetensors"] if weights else _SMALL_FILES
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as e:  # the hub's own errors derive from these
        reason = f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else 'no reason given'}"
        at = f" at revision {revision!r}" if revision else ""
        raise ModelLoadError(
            f"no folder {model!r} here, and the hub gave no such model{at} ({reason}): check the name, the network, "
            "and access to gated models, or give a local folder"
        ) from e
