"""The developers' timing of one layer runs, and sees when a form computes something else."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "device" / "layer_chain.py"


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["layer_chain.py", "--tiny", "--rows", "3", "--context", "20"])
    return runpy.run_path(str(SCRIPT))


def test_it_runs(tiny, capsys):
    tiny["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plain JAX") and "us a layer" in lines[0]
    assert json.loads(lines[-1]).keys() == {"plain JAX"}


def test_a_form_that_computes_something_else_is_seen(tiny, monkeypatch):
    step = tiny["step"]

    def wrong(*args, norm, **more):
        out, kvs = step(*args, norm="xla", **more)
        return (out * 1.1 if norm == "wrong" else out), kvs

    forms = {"right": dict(own=(), norm="xla"), "wrong": dict(own=(), norm="wrong")}
    space = tiny["main"].__globals__
    monkeypatch.setitem(space, "step", wrong)
    monkeypatch.setitem(space, "FORMS", forms)
    monkeypatch.setitem(space, "set_up_device", lambda *args: Setup())
    with pytest.raises(AssertionError, match="wrong computes something else"):
        tiny["main"]()


class Setup:
    """A CPU that says it has the kernels, so that FORMS are compared; their plain-JAX forms run."""

    is_gpu = False

    def __init__(self):
        self.asked = 0

    @property
    def implementation(self) -> str:
        self.asked += 1
        return "triton" if self.asked == 1 else "xla"
