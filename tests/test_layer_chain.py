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
    script = runpy.run_path(str(SCRIPT))
    script["main"].__globals__.update(LAYERS=2, ROUNDS=1, CALLS=1)
    return script


def test_every_form_runs_and_computes_the_same(tiny, capsys):
    tiny["main"]()
    times, kernels = (lines := capsys.readouterr().out.splitlines())[: len(lines) // 2], lines[len(lines) // 2 :]
    assert [line[:22].strip() for line in times] == list(tiny["FORMS"]) and all("us a layer" in line for line in times)
    assert [list(json.loads(line)) for line in kernels] == [[name] for name in tiny["FORMS"]]


@pytest.mark.parametrize("op", ["swiglu", "residual_matmul", "skinny_matmul"])
def test_a_form_that_computes_something_else_is_seen(op, tiny, monkeypatch):
    space = tiny["main"].__globals__
    right = space[op]

    def wrong(*args, **options):
        out = right(*args, **options)
        return (1.1 * out[0], *out[1:]) if isinstance(out, tuple) else 1.1 * out

    monkeypatch.setitem(space, op, wrong)
    with pytest.raises(AssertionError, match="computes something else"):
        tiny["main"]()
