"""What every test gets: JAX on the CPU, unless the tests for real devices were asked for (`pytest -m device`)."""

from __future__ import annotations

import os

import pytest


def _wants_device(config: pytest.Config) -> bool:
    return "device" in config.option.markexpr.replace("not device", "")


def pytest_configure(config: pytest.Config) -> None:
    if not _wants_device(config):
        os.environ["JAX_PLATFORMS"] = "cpu"
    # A test must neither use nor fill the compilation cache of the person who runs it.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    # Tests compile far more than they compute.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_finish(session: pytest.Session) -> None:
    if not any(item.get_closest_marker("device") for item in session.items):
        return
    import jax

    if jax.default_backend() != "gpu":
        raise pytest.UsageError(f"device tests need an NVIDIA GPU, but JAX sees {jax.devices()}")
