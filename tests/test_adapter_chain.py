"""The developers' timing of a layer with adapters runs, and sees when a form computes something else."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "device"
TINY = "adapter_chain.py --tiny --rounds 1 --calls 1 --rows 3 --active 1 2".split()


def run(monkeypatch, *more: str, **changed) -> dict:
    monkeypatch.setattr(sys, "argv", [*TINY, *more])
    monkeypatch.syspath_prepend(str(FOLDER))
    script = runpy.run_path(str(FOLDER / "adapter_chain.py"))
    script["main"].__globals__.update({name: change(script[name]) for name, change in changed.items()})
    script["main"]()
    return script


def test_every_form_runs_and_computes_the_same(monkeypatch, capsys):
    script = run(monkeypatch, "--rank", "8", "33", "--slot-rank", "64", "--profile")
    lines = capsys.readouterr().out.splitlines()
    forms = [name for name in script["FORMS"] if name != "plain" for _ in (1, 2)]
    assert [line[:22].strip() for line in lines[: 1 + len(forms)]] == ["plain", *forms]
    assert len([json.loads(line) for line in lines[1 + len(forms) :]]) == 1 + len(forms)


def test_a_form_that_computes_something_else_is_seen(monkeypatch):
    calls = []

    def wrong(right):
        def step(*args, **options):
            out, kvs = right(*args, **options)
            calls.append(1)
            return out * (2 if len(calls) == 3 else 1), kvs

        return step

    with pytest.raises(AssertionError, match="computes something else"):
        run(monkeypatch, step=wrong)
