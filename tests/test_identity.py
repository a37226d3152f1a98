"""Idle LoRA is free: an engine with it runs, while no adapter is active, the very programs of an engine without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_jax.config import SchedulerConfig
from lora_jax.step_keys import step_keys
from tests.support import tiny


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> dict[str, dict]:
    """Two fresh processes without a compilation cache: an engine without LoRA and one with it, idle."""
    base = tiny.save_base("llama", tmp_path_factory.mktemp("base"))
    script = str(Path(__file__).with_name("support") / "engine_process.py")
    out = {}
    for mode in ("plain", "lora"):
        done = subprocess.run(
            [sys.executable, script, str(base), mode], capture_output=True, text=True, timeout=280, env=os.environ
        )
        assert done.returncode == 0, done.stderr[-3000:]
        out[mode] = json.loads(done.stdout.strip().splitlines()[-1])
    return out


def test_programs_are_equal(processes):
    plain, lora = (processes[mode]["hashes"] for mode in ("plain", "lora"))
    assert len(plain) == len(step_keys(SchedulerConfig(2, 32, 64), enable_lora=False))
    assert plain == {key: lora[key] for key in plain}
    extra = set(lora) - set(plain)
    assert extra and all("lora" in key for key in extra)
    pairs = [(key, key.replace("+lora", "")) for key in extra if key.replace("+lora", "") in plain]
    assert len(pairs) >= 4 and all(lora[a] != lora[b] for a, b in pairs), "the hash cannot tell programs apart"


def test_logits_are_bit_equal(processes):
    plain, lora = (processes[mode]["logprobs"] for mode in ("plain", "lora"))
    assert plain == lora and len(plain[0]) == 8


def test_nothing_compiles_while_serving(processes):
    assert all(p["stats"]["compilations_after_warmup"] == 0 for p in processes.values())
