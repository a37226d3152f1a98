"""The comparison with transformers + PEFT gives both sides the same work: both answer as the oracle does."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import numpy as np

from tests.support import tiny

SCRIPT = Path(__file__).parent / "device" / "hf_throughput.py"


def test_both_sides_give_what_was_asked(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = runpy.run_path(str(SCRIPT))
        base = tiny.save_base("llama", tmp_path / "base")
        adapters = {name: str(tiny.save_adapter(base, tmp_path / name, seed=i)) for i, name in enumerate("ab", 1)}
        rng = np.random.default_rng(0)
        items = [(rng.integers(3, tiny.VOCAB, 4 + i).tolist(), 3 + i % 4, [None, "a", "b"][i % 3]) for i in range(7)]
        _, theirs = script["by_transformers"](str(base), adapters, items, 2)
        _, ours = script["by_this"](str(base), adapters, items, 2)
    for (prompt, count, name), one, other in zip(items, theirs, ours, strict=True):
        want, margin = tiny.Oracle(base, Path(adapters[name]) if name else None).greedy(prompt, count)
        assert margin > 1e-4 and one == other == want, (name, prompt)


def test_the_list_is_always_the_same():
    script = runpy.run_path(str(SCRIPT))
    items = script["requests"](20, ["a", "b"], 3, 9)
    assert items == script["requests"](20, ["a", "b"], 3, 9)
    assert {name for _, _, name in items} == {None, "a", "b"} and all(3 <= n <= 9 for _, n, _ in items)
