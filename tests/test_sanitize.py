"""The list that memory checkers run on a card, here interpreted and in part: it runs, and says when a kernel is wrong."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.support import kernel_checks

SCRIPT = Path(__file__).resolve().parent / "device" / "sanitize.py"


def run(monkeypatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--form", "interpret", *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_list_runs(monkeypatch, capsys):
    run(monkeypatch, "--only", "norm")
    assert "norm: right" in capsys.readouterr().out


def test_a_wrong_kernel_ends_it(monkeypatch):
    monkeypatch.setattr(kernel_checks, "add_rms_norm", lambda x, y, scale, **how: (x, x))
    with pytest.raises(AssertionError):
        run(monkeypatch, "--only", "norm")


def test_a_name_that_does_not_exist_is_named(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--only", "nothing")
    assert "nothing: there are norm" in capsys.readouterr().err
