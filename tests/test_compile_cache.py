"""The cache of compiled programs: which folder, what a second start takes from it, what damage does."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from lora_jax.compile_cache import autotune_folder, one_warning, use_compilation_cache
from tests.support import tiny


@pytest.fixture
def cache_settings():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_which_cache(cache_settings, tmp_path, monkeypatch):
    in_use = lambda: jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]  # noqa: E731
    assert use_compilation_cache("") is None and in_use() is None
    assert use_compilation_cache(str(tmp_path / "mine")) == in_use() == str(tmp_path / "mine")
    assert use_compilation_cache(str(tmp_path / "other")) == in_use() == str(tmp_path / "mine"), "configured already"
    for root, home in ((str(tmp_path / "xdg"), "h"), (None, str(tmp_path / "home"))):
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv("XDG_CACHE_HOME", root) if root else monkeypatch.delenv("XDG_CACHE_HOME")
        want = Path(root or f"{home}/.cache") / "lora_jax" / "xla"
        assert use_compilation_cache(None) == in_use() == str(want)


_PROGRAM = """
import collections, json, sys
import jax

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **kw: events.update([event.rpartition("/")[2]]))
from lora_jax import LLM, SamplingParams, builder

use = builder.use_compilation_cache

def use_for_all(folder):  # tiny programs compile too quickly to be kept
    path = use(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return path

builder.use_compilation_cache = use_for_all
llm = LLM(sys.argv[1], device="cpu", max_num_seqs=1, max_num_batched_tokens=16, num_pages=5, disable_tqdm=True,
          compilation_cache_dir=sys.argv[2])
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
out = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0].token_ids
hashes = {row["key"]: row["program_hash"] for row in llm.step_table.report()}
print(json.dumps({"events": events, "tokens": out, "hashes": hashes, "stats": llm.stats()}))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_base("llama", tmp_path_factory.mktemp("base") / "llama")


def run(base: Path, *caches: Path) -> list[tuple[dict, str]]:
    """(what the program found, its log) of one process a cache, all at the same time."""
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "true"}
    commands = [[sys.executable, "-c", _PROGRAM, str(base), str(cache)] for cache in caches]
    processes = [
        subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands
    ]
    found = []
    for process in processes:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        found.append((json.loads(out.strip().splitlines()[-1]), errors))
    return found


def entries(cache: Path) -> list[Path]:
    return sorted(p for p in cache.rglob("*") if p.name.endswith("-cache"))


def test_a_second_start_is_served_from_the_cache(base, tmp_path):
    cache = tmp_path / "cache"
    [(first, _)] = run(base, cache)
    stored = entries(cache)
    [(second, _)] = run(base, cache)
    names = {p.name.rsplit("-", 2)[0] for p in stored}
    assert entries(cache) == stored and {"jit_decode_step", "jit_prefill_step"} <= names
    assert first["events"]["cache_misses"] >= len(stored)
    assert second["events"].get("cache_misses", 0) == 0 and second["events"]["cache_hits"] >= len(stored)
    assert first["tokens"] == second["tokens"] == tiny.Oracle(base).greedy([5, 6, 7], 4)[0]
    assert first["hashes"] == second["hashes"] and len(first["hashes"]) > 5
    assert first["stats"]["compilations_after_warmup"] == second["stats"]["compilations_after_warmup"] == 0


def test_a_damaged_cache_is_ignored_with_one_warning_and_two_processes_may_share_one(base, tmp_path):
    cache = tmp_path / "cache"
    (a, _), (b, _) = run(base, cache, cache)
    assert a["tokens"] == b["tokens"] and a["hashes"] == b["hashes"]
    damaged = entries(cache)
    for i, path in enumerate(damaged):
        path.write_bytes([b"", b"not an executable", path.read_bytes()[:100]][i % 3])
    [(after, log)] = run(base, cache)
    assert after["tokens"] == a["tokens"] and after["hashes"] == a["hashes"]
    told = [line for line in log.splitlines() if "compilation cache" in line]
    assert len(told) == 1 and str(cache) in told[0] and "compiled anew" in told[0], log
    # JAX does not write over an entry: the damaged ones are gone, so that the next start writes them and the one after is quick
    assert not {path.name for path in entries(cache)} & {path.name for path in damaged}
    [(healed, log)] = run(base, cache)
    assert "compilation cache" not in log and healed["tokens"] == a["tokens"]
    assert {path.name for path in entries(cache)} == {path.name for path in damaged}


def test_other_warnings_pass(caplog):
    with pytest.warns(UserWarning, match="something else") as seen, one_warning():
        warnings.warn("something else", UserWarning, stacklevel=1)
        warnings.warn("Error reading persistent compilation cache entry for 'jit_a': x", UserWarning, stacklevel=1)
        warnings.warn("Error reading persistent compilation cache entry for 'jit_b': y", UserWarning, stacklevel=1)
    assert len(seen) == 1 and len(caplog.records) == 1 and "2 entries" in caplog.text


def test_tuning_results_of_another_card_or_version_are_not_found(tmp_path, monkeypatch, caplog):
    here = autotune_folder(str(tmp_path), "NVIDIA H200")
    assert here is not None and Path(here).is_dir()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    folders = {here, autotune_folder(str(tmp_path), "NVIDIA H200"), autotune_folder(str(tmp_path), "NVIDIA L4")}
    assert len(folders) == 3
    (tmp_path / "file").write_text("")
    assert autotune_folder(str(tmp_path / "file"), "NVIDIA L4") is None and "not kept" in caplog.text
