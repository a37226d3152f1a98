"""The developers' profile of an engine's steps runs, and adds up what it finds."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "device" / "step_profile.py"


@pytest.fixture
def script(monkeypatch):
    sizes = ["--max-loras", "2", "--max-num-seqs", "4", "--max-model-len", "256"]
    monkeypatch.setattr(sys, "argv", ["step_profile.py", "--model", "tiny", *sizes, "3:0", "4:2", "4:zipf"])
    monkeypatch.setenv("XLA_FLAGS", "")  # what the script sets is for its own process
    return runpy.run_path(str(SCRIPT))


def test_every_kind_is_shown(script, capsys):
    script["main"]()
    lines = [line for line in capsys.readouterr().out.splitlines() if "a step" in line]
    assert [line.split()[0] for line in lines] == ["3:0", "4:2", "4:zipf"]


def test_sums_and_gaps(script):
    events = [(0.0, 10.0, "product_1"), (8.0, 12.0, "copy"), (20.0, 26.0, "product_2")]
    first, second, third = script["table"]("8:0", 3.5, events * 1, 2)
    steps = script["PROFILED"]
    assert script["busy"](events) == 18
    assert f"profiled {26 / steps:.0f} us, idle {8 / steps:.0f}" in first
    assert f"{16 / steps:.1f} us" in second and "product" in second and "copy" in third
