"""Where a benchmark's result goes: files that cannot be written are refused before it runs, or take nothing else with them."""

from __future__ import annotations

import json

import pytest

from lora_jax.bench import cli, latency, plot
from lora_jax.cli import main

COMMAND = ["bench", "latency", "--model", "tiny", "--load-format", "dummy"]
FOUND = {"hardware": {}, "what": "was measured"}


@pytest.fixture
def ran(monkeypatch):
    """How often the benchmark ran, and what it returns then."""
    times = []
    monkeypatch.setattr(latency, "run", lambda options: times.append(1) or dict(FOUND))
    monkeypatch.setattr(latency, "chart", lambda result: [])
    return times


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("name", ["", "folder.png", "missing/file.png", "kept.png"])
def test_what_cannot_be_written_is_refused_before_anything_runs(option, name, ran, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "kept.png").touch()
    real = cli.os.access
    monkeypatch.setattr(cli.os, "access", lambda path, mode: str(path) != "kept.png" and real(path, mode))
    assert main([*COMMAND, option, name]) == 2 and not ran
    assert (name or "''") in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_what_cannot_be_written_any_more_costs_no_result(option, ran, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*(cli, "_write") if option == "--json" else (plot, "save"), full)
    path = str(tmp_path / "result.png")
    assert main([*COMMAND, option, path]) == 1 and ran == [1]
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["what"] == FOUND["what"]
    assert path in err and "No space left" in err


def test_a_result_that_cannot_be_kept_on_the_way_does_not_end_the_run(ran, tmp_path, monkeypatch, capsys):
    writes = []

    def full_once(path, text):
        writes.append(text)
        if len(writes) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "_write", full_once)
    monkeypatch.setattr(latency, "run", lambda options: options.keep({**FOUND, "what": "is not all"}) and dict(FOUND))
    assert main([*COMMAND, "--json", str(tmp_path / "result.json")]) == 0 and len(writes) == 2
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["what"] == json.loads(writes[1])["what"] == FOUND["what"]
    assert "No space left" in err
