"""Adapters on their way to slots: another thread prepares them, so that steps run meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from lora_jax import LLM, LoRARequest, SamplingParams
from lora_jax.errors import AdapterCapacityError, AdapterNotFoundError
from lora_jax.lora.adapter import Adapter
from lora_jax.lora.staging import STALE, Staging
from tests.support import tiny


@dataclass(frozen=True)
class Named:
    name: str


A, B, C = adapters = [cast(Adapter, Named(name)) for name in "abc"]


class Preparing:
    """What `Staging` prepares with: each adapter when `go` says so."""

    def __init__(self, room: int = 2):
        self.go: dict[str, threading.Event] = {a.name: threading.Event() for a in adapters}
        self.threads: list[tuple[str, str]] = []
        self.now = 0.0
        self.staging: Staging[Any] = Staging(self, room, lambda: self.now)

    def __call__(self, adapter) -> str:
        self.threads.append((adapter.name, threading.current_thread().name.split("_")[0]))
        assert self.go[adapter.name].wait(30)
        if adapter is C:
            raise ValueError("broken")
        return adapter.name.upper()

    def ready_soon(self, adapter) -> bool:
        until = time.monotonic() + 30
        while not self.staging.ready(adapter):
            assert time.monotonic() < until
            time.sleep(0.001)
        return True


def test_prepared_in_another_thread_and_taken_once():
    p = Preparing()
    assert not p.staging.ready(A) and not p.staging.ready(A)
    p.go["a"].set()
    assert p.ready_soon(A) and p.staging.take(A) == "A"
    assert p.threads == [("a", "lora-jax-staging")]
    assert p.staging.take(A) == "A", "nobody had asked: prepared here"
    assert p.threads[1:] == [("a", "MainThread")]


def test_take_waits_for_what_is_under_way():
    p = Preparing()
    p.staging.ready(A)
    threading.Timer(0.05, p.go["a"].set).start()
    assert p.staging.take(A) == "A" and len(p.threads) == 1


def test_room_is_made_by_those_that_nobody_asks_for_any_more():
    p = Preparing(room=1)
    p.go["a"].set(), p.go["b"].set()
    p.ready_soon(A)
    p.now = STALE
    assert not p.staging.ready(B) and len(p.threads) == 1
    p.staging.ready(A)
    p.now = 2 * STALE
    assert not p.staging.ready(B)
    p.now += 0.1
    assert p.ready_soon(B) and p.staging.take(B) == "B"
    p.ready_soon(A)
    assert [name for name, _ in p.threads] == ["a", "b", "a"]


def test_one_that_is_under_way_keeps_its_room():
    p = Preparing(room=1)
    p.staging.ready(A)
    p.now = 10 * STALE
    assert not p.staging.ready(B)
    p.go["a"].set()
    assert p.staging.take(A) == "A"


def test_a_failure_is_told_to_whoever_takes_it():
    p = Preparing()
    p.go["c"].set()
    assert p.ready_soon(C)
    with pytest.raises(ValueError, match="broken"):
        p.staging.take(C)


def test_forgotten_ones_are_prepared_again():
    p = Preparing()
    p.go["a"].set()
    p.ready_soon(A)
    p.staging.forget()
    assert not p.staging.ready(A) or len(p.threads) == 2
    assert p.staging.take(A) == "A" and len(p.threads) == 2


# ---- in an engine ----
@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_base("llama", tmp_path_factory.mktemp("base"))


def test_steps_run_while_an_adapter_is_on_its_way(base, tmp_path, monkeypatch):
    """Its request waits, the others do not, and it gets what it would have got."""
    path = tiny.save_adapter(base, tmp_path / "adapter", seed=1)
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=96, max_loras=1)
    llm = LLM(str(base), enable_lora=True, max_lora_rank=8, disable_tqdm=True, **sizes)
    llm.load_lora("a", str(path))
    engine, go = llm.engine, threading.Event()
    prepare = engine._runtime._staging._prepare
    monkeypatch.setattr(engine._runtime._staging, "_prepare", lambda adapter: (go.wait(60), prepare(adapter))[1])
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": list(range(3, 12))}
    for name, lora in ("base", None), ("adapter", LoRARequest("a")):
        engine.add_request(engine.make_request(prompt, params, lora, name))
    got: dict[str, list[int]] = {"base": [], "adapter": []}

    def step() -> None:
        for output in engine.step():
            assert output.error is None
            got[output.request_id] += output.token_ids

    while len(got["base"]) < 10:
        step()
    assert not got["adapter"] and engine.stats()["slot_writes"] == 0
    go.set()
    while engine.has_unfinished():
        step()
    assert [len(tokens) for tokens in got.values()] == [30, 30] and engine.stats()["slot_writes"] == 1
    want, margin = tiny.Oracle(base, path).greedy(prompt["prompt_token_ids"], 30)
    assert margin > 1e-4 and got["adapter"] == want


def test_a_request_alone_waits_for_its_adapter(base, tmp_path):
    path = tiny.save_adapter(base, tmp_path / "adapter", seed=2)
    sizes = dict(max_num_seqs=1, max_num_batched_tokens=32, max_model_len=96, max_loras=1)
    llm = LLM(str(base), enable_lora=True, max_lora_rank=8, disable_tqdm=True, **sizes)
    llm.load_lora("a", str(path))
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, lora_request=LoRARequest("a"))
    want, margin = tiny.Oracle(base, path).greedy([5, 6, 7], 5)
    assert margin > 1e-4 and output.outputs[0].token_ids == want


def test_a_pinned_adapter_keeps_its_slot(base, tmp_path):
    paths = {name: tiny.save_adapter(base, tmp_path / name, seed=i) for i, name in enumerate("abc")}
    sizes = dict(max_num_seqs=1, max_num_batched_tokens=32, max_model_len=96, max_loras=2)
    llm = LLM(str(base), enable_lora=True, max_lora_rank=8, disable_tqdm=True, **sizes)
    for name, path in paths.items():
        llm.load_lora(name, str(path))

    def writes(*names: str) -> int:
        before = llm.stats()["slot_writes"]
        for name in names:
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=1), LoRARequest(name))
        return llm.stats()["slot_writes"] - before

    llm.pin_lora("a")
    assert writes("a", "b", "c", "b", "a") == 4, "b and c take turns beside a"
    with pytest.raises(AdapterCapacityError, match="one must stay free"):
        llm.pin_lora("b")
    llm.unpin_lora("a")
    assert writes("b", "c", "a") == 2
    for call in llm.pin_lora, llm.unpin_lora:
        with pytest.raises(AdapterNotFoundError):
            call("none")


def test_without_adapters_there_is_nothing_to_pin(base):
    llm = LLM(str(base), disable_tqdm=True, max_num_seqs=1, max_num_batched_tokens=32, max_model_len=96)
    for call in llm.pin_lora, llm.unpin_lora:
        with pytest.raises(AdapterNotFoundError):
            call("a")
