"""Where the engine runs: which device, which implementation, how much memory, which cache of compiled programs."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_jax import LLM
from lora_jax.device import (
    COMMAND_BUFFER_KINDS,
    _implementation,
    compiler_options,
    free_memory,
    set_up_device,
)
from lora_jax.errors import ConfigError
from tests.support import tiny

FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def gpu(capability: str = "9.0", **more: Any) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability=capability, **more)


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A machine with an NVIDIA card, as far as its commands show it; JAX has the CPU only."""
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)  # which the tests set


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr("lora_jax.device._nvidia_card", lambda: False)


@pytest.fixture(autouse=True)
def no_fraction(monkeypatch):
    for name in FRACTIONS:
        monkeypatch.setenv(name, "set so that it is restored")
        monkeypatch.delenv(name)


# -- the device --


@pytest.mark.parametrize("device", ["auto", "gpu"])
def test_a_card_that_jax_cannot_use_is_an_error(card, device):
    with pytest.raises(ConfigError, match="NVIDIA card is present") as e:
        set_up_device(device, "auto", 0.9)
    for part in ("lora-jax[cuda13]", "driver 580", "lora-jax[cuda12]", "driver 525", "device=cpu"):
        assert part in str(e.value)


def test_the_cpu_may_be_chosen_beside_a_card(card):
    setup = set_up_device("cpu", "auto", 0.9)
    assert setup.device.platform == "cpu" and not setup.is_gpu and setup.implementation == "xla"
    assert setup.mesh.axis_names == ("tp",) and setup.mesh.devices.tolist() == [setup.device]


def test_without_a_card_auto_is_the_cpu_and_gpu_an_error(no_card):
    assert set_up_device("auto", "auto", 0.9).device.platform == "cpu"
    with pytest.raises(ConfigError, match="device=gpu was asked for.*lora-jax.cuda13"):
        set_up_device("gpu", "auto", 0.9)


def test_an_engine_says_so_before_it_reads_a_weight(card, tmp_path):
    base = tiny.save_base("llama", tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="NVIDIA card is present"):
        LLM(str(base), disable_tqdm=True)


# -- the implementation --


@pytest.mark.parametrize(
    ("wanted", "capability", "chosen"),
    [("auto", "9.0", "triton"), ("auto", "8.0", "triton"), ("auto", "12.0", "triton")]
    + [("triton", "8.9", "triton"), ("xla", "9.0", "xla"), ("xla", "7.5", "xla")],
)
def test_cards_that_can_do_it_choose_in_silence(wanted, capability, chosen, caplog):
    assert _implementation(wanted, gpu(capability)) == chosen
    assert not caplog.records


@pytest.mark.parametrize("capability", ["7.5", "7.0", "6.1"])
def test_an_old_card_falls_back_with_one_loud_line(capability, caplog):
    assert _implementation("auto", gpu(capability)) == "xla"
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    text = caplog.records[0].getMessage()
    assert all(part in text for part in ("KERNELS ARE NOT USED", "NVIDIA H200", capability, "8.0", "xla"))


def test_triton_where_it_cannot_run_is_an_error(caplog):
    with pytest.raises(ConfigError, match="NVIDIA H200 has compute capability 7.5, below 8.0; use implementation=xla"):
        _implementation("triton", gpu("7.5"))
    with pytest.raises(ConfigError, match="implementation=triton needs an NVIDIA GPU.*implementation=xla"):
        set_up_device("cpu", "triton", 0.9)
    assert not caplog.records


def test_the_cpu_says_once_that_it_uses_xla(caplog):
    caplog.set_level(logging.INFO, "lora_jax")
    assert set_up_device("cpu", "auto", 0.9).implementation == "xla"
    assert [r.getMessage() for r in caplog.records] == ["kernels: implementation=xla (no GPU)"]
    assert set_up_device("cpu", "xla", 0.9).implementation == "xla"
    assert len(caplog.records) == 1, "it was asked for: nothing to say"


# -- memory --


@pytest.mark.parametrize("share", [0.9, 0.35])
def test_the_share_reaches_jax_before_its_client_starts(share):
    set_up_device("cpu", "auto", share)
    assert [os.environ[name] for name in FRACTIONS if name in os.environ] == [f"{share:.3f}"]


@pytest.mark.parametrize("name", FRACTIONS)
def test_a_share_that_the_user_gave_jax_stays(name, monkeypatch):
    """And alone: JAX's GPU client does not start where both names are set."""
    monkeypatch.setenv(name, "0.25")
    set_up_device("cpu", "auto", 0.9)
    assert {n: os.environ.get(n) for n in FRACTIONS} == {**dict.fromkeys(FRACTIONS), name: "0.25"}


def test_free_memory():
    setup = set_up_device("cpu", "auto", 0.9)
    half, whole = free_memory(setup, 0.5), free_memory(setup, 1.0)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < half < whole <= total and half == pytest.approx(whole / 2, rel=0.2)
    card = gpu(memory_stats=lambda: {"bytes_limit": 1000, "bytes_in_use": 300})
    assert (
        free_memory(dataclasses.replace(setup, device=card), 0.5) == 700
    )  # the client's limit holds the share already


# -- options of the compiler --


def test_compiler_options(tmp_path):
    setup = set_up_device("cpu", "auto", 0.9)
    assert compiler_options(setup, True, str(tmp_path)) == {}
    setup = dataclasses.replace(setup, device=gpu())
    options = compiler_options(setup, True, str(tmp_path))
    kept = Path(str(options.pop("xla_gpu_per_fusion_autotune_cache_dir")))
    assert options == {"xla_gpu_enable_command_buffer": COMMAND_BUFFER_KINDS, "xla_gpu_graph_min_graph_size": 1}
    assert kept.is_dir() and tmp_path in kept.parents and kept.name == "NVIDIA_H200"  # a card's tuning is its own
    assert compiler_options(setup, False, None) == {"xla_gpu_enable_command_buffer": ""}


def test_jax_platforms_is_a_choice(card, monkeypatch):
    """Whoever told JAX to use the CPU is not told to install a plugin; asked for a GPU by name, it is still an error."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert set_up_device("auto", "auto", 0.9).device.platform == "cpu"
    with pytest.raises(ConfigError, match="cuda13"):
        set_up_device("gpu", "auto", 0.9)
