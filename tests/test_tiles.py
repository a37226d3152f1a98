"""Measured tiles: in use while a program is traced, in a file beside the compile cache, in an engine."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from lora_jax.kernels import candidates as space
from lora_jax.kernels import tuning
from lora_jax.kernels.candidates import LARGEST_CARD, SMALLEST_CARD, candidates, from_data, to_data
from lora_jax.kernels.tuned import RULES, Key, Recorder, TileTable, tiles_in_use
from lora_jax.kernels.tuning import MatmulTiles

from lora_jax import LLM, SamplingParams, builder, kv_cache, tiles
from lora_jax.device import set_up_device
from lora_jax.models import layers
from lora_jax.models.llama import hf_plan
from lora_jax.spec import step_entries
from lora_jax.step_keys import StepKey
from lora_jax.tiles import read_tiles, stored_tiles, table_name, tiles_file, write_tiles
from tests.support import fused_lora_checks as fused
from tests.support import step_programs

QKV = Key("matmul_tiles", (8, 4096, 12288, 2, False))
GATE_UP = Key("swiglu_tiles", (8, 4096, 11008, 2))
LORA = Key("lora_tiles", (8, 4096, 3, 8, 16, 2, 64, True))
ATTENTION = Key("attention_tiles", (8, 32, 1, 256, 128, 2))
KEYS = (QKV, GATE_UP, LORA, ATTENTION)
OTHER = {key: candidates(key)[0] for key in KEYS}


def own(key: Key):
    return RULES[key.rule](**space.named(key))


# ---- a table in use --------------------------------------------------------------------------------------------------
def test_the_table_comes_before_the_rule_and_only_in_its_block():
    with tiles_in_use(TileTable.of(OTHER)):
        assert tuning.matmul_tiles(8, 4096, 12288, 2) == OTHER[QKV] != own(QKV)  # the default is part of the key
        assert tuning.matmul_tiles(8, 4096, 12288, itemsize=2, adapters=False) == OTHER[QKV]
        assert tuning.lora_tiles(8, 4096, 3, 8, 16, 2, 64, waits=True) == OTHER[LORA]
        assert tuning.matmul_tiles(8, 4096, 12288, 2, True) == RULES["matmul_tiles"](8, 4096, 12288, 2, True)
    assert tuning.matmul_tiles(8, 4096, 12288, 2) == own(QKV)


def test_other_threads_have_their_own():
    seen = []
    with tiles_in_use(TileTable.of(OTHER)):
        thread = threading.Thread(target=lambda: seen.append(tuning.matmul_tiles(8, 4096, 12288, 2)))
        thread.start()
        thread.join()
    assert seen == [own(QKV)]


def test_what_was_traced_with_one_table_is_not_taken_for_another():
    @jax.jit
    def block_k():
        return tuning.matmul_tiles(8, 4096, 12288, 2).block_k + jnp.zeros((), jnp.int32)

    other = dataclasses.replace(own(QKV), block_k=64)
    assert int(block_k()) == own(QKV).block_k == 128
    with tiles_in_use(TileTable.of({QKV: other})):
        assert int(block_k()) == 64
        size = block_k._cache_size()
    with tiles_in_use(TileTable.of({QKV: other})):  # an equal one
        assert int(block_k()) == 64 and block_k._cache_size() == size
    with tiles_in_use(TileTable()):  # an empty one is none
        assert int(block_k()) == 128 and block_k._cache_size() == size


def test_what_is_asked_for_is_recorded():
    seen = Recorder(TileTable.of(OTHER))
    with tiles_in_use(seen):
        assert tuning.swiglu_tiles(*GATE_UP.arguments) == OTHER[GATE_UP]
        assert tuning.norm_warps(8, 4096) and tuning.matmul_tiles(8, 4096, 12288, 2) == OTHER[QKV]
    assert list(seen.keys) == [GATE_UP, QKV]


# ---- candidates ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_rules_own_choices_are_in_the_space_and_have_neighbours(rows, itemsize):
    keys = [
        Key("matmul_tiles", (rows, 4096, 12288, itemsize, False)),
        Key("matmul_tiles", (rows, 576, 960, itemsize, True)),
        Key("swiglu_tiles", (rows, 4096, 11008, itemsize)),
        Key("lora_tiles", (rows, 11008, 1, 8, 16, itemsize, 64, True)),
        Key("lora_tiles", (rows, 4096, 3, 4, 64, itemsize, 64, True)),
        Key("lora_tiles", (rows, 4096, 3, 32, 64, itemsize, 128, True)),
        Key("lora_tiles", (rows, 4096, 2, 32, 16, itemsize, 128, False)),
        Key("attention_tiles", (rows, 32, 1, 256, 128, itemsize)),
        Key("attention_tiles", (rows, 8, 4, 2048, 128, itemsize)),
    ]
    for key in keys:
        assert space.allowed(key, own(key)), key
        for shared in (SMALLEST_CARD, LARGEST_CARD):
            found = candidates(key, shared=shared)
            assert 3 <= len(found) == len(set(found)) <= 12 and own(key) not in found, key
            assert all(space.allowed(key, t, shared) and type(t) is type(own(key)) for t in found)


def test_candidates_keep_what_kernels_need():
    for key in KEYS:
        for t in candidates(key, shared=LARGEST_CARD):
            if key.rule == "matmul_tiles":
                assert 12288 % t.block_n == 0 and 4096 % (t.parts * t.block_k) == 0 and t.block_n >= 64
            if key.rule == "swiglu_tiles":
                assert 11008 % t.block_n == 0 and 4096 % t.block_k == 0 and t.parts == 1
            if key.rule == "lora_tiles":
                assert 4096 % t.block_k == 0 and t.groups <= 8 and t.chunk in (32, 64)
    groups = [t for t in candidates(Key("attention_tiles", (8, 8, 4, 256, 128, 2))) if t.vector or t.lanes]
    assert groups == []  # one query head a program would leave three of four out
    assert any(not t.vector for t in candidates(ATTENTION)) and candidates(Key("norm_warps", (8, 4096))) == []


# ---- the file --------------------------------------------------------------------------------------------------------
def test_a_table_comes_back_from_its_file_beside_those_of_others(tmp_path):
    path = tmp_path / "new" / "tiles.json"
    write_tiles(path, "card a", TileTable.of(OTHER), set(KEYS))
    write_tiles(path, "card b", TileTable.of({QKV: OTHER[QKV]}), {QKV})
    assert read_tiles(path, "card a").by_key == OTHER and len(read_tiles(path, "card b").entries) == 1
    assert not read_tiles(path, "card c").entries and not read_tiles(tmp_path / "none.json", "card a").entries
    # measured again: the rule's choice won this time; what was not measured stays
    assert QKV not in write_tiles(path, "card a", TileTable(), {QKV}).by_key
    assert read_tiles(path, "card a").by_key == {key: t for key, t in OTHER.items() if key != QKV}
    assert [p.name for p in path.parent.iterdir()] == ["tiles.json"]


def test_a_name_tells_cards_versions_and_kernels_apart(monkeypatch):
    card = lambda kind: type("Device", (), {"device_kind": kind})()  # noqa: E731
    names = {table_name(card("NVIDIA H200")), table_name(card("NVIDIA L4"))}
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    names.add(table_name(card("NVIDIA L4")))
    monkeypatch.setattr(tiles, "_kernels_hash", lambda: "0")
    names.add(table_name(card("NVIDIA L4")))
    assert len(names) == 4


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[1]", b'{"tables": 3}', b"\xff\xfe", b'{"tables": {}}x', b"[" * 100_000, b" " * (1 + (16 << 20))],
    ids=lambda text: repr(text[:12]),
)
def test_a_damaged_file_is_ignored_with_one_warning_and_replaced(text, tmp_path, caplog):
    path = tmp_path / "tiles.json"
    path.write_bytes(text)
    assert not read_tiles(path, "card").entries
    assert len(caplog.records) == 1 and str(path) in caplog.text
    write_tiles(path, "card", TileTable.of(OTHER), set(KEYS))
    assert read_tiles(path, "card").by_key == OTHER


def damaged(**changes):
    (entry,) = to_data(TileTable.of({QKV: OTHER[QKV]}))
    return {**entry, **{name: {**entry[name], **change} for name, change in changes.items()}}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {**damaged(), "rule": "other_tiles"},
        {**damaged(), "rule": "norm_warps"},
        {**damaged(), "rule": ["matmul_tiles"]},
        {**damaged(), "more": 1},
        {**damaged(), "tiles": [64, 64, 1, 4, 4]},
        damaged(arguments={"rows": "8"}),
        damaged(arguments={"rows": 0}),
        damaged(arguments={"inputs": 4096.0}),
        damaged(arguments={"adapters": 1}),
        damaged(arguments={"more": 1}),
        damaged(tiles={"more": 1}),
        damaged(tiles={"block_n": True}),
        damaged(tiles={"block_n": 96}),
        damaged(tiles={"block_n": 0}),
        damaged(tiles={"block_n": -64}),
        damaged(tiles={"block_n": 32}),
        damaged(tiles={"block_k": 1 << 20}),
        damaged(tiles={"parts": 3}),
        damaged(tiles={"num_stages": 99}),
        damaged(tiles={"num_warps": 3}),
    ],
    ids=str,
)
def test_an_unsound_entry_is_left_out(entry, tmp_path, caplog):
    assert from_data([damaged()])[1] == 0
    good = to_data(TileTable.of({LORA: OTHER[LORA]}))
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"tables": {"card": [entry, *good]}}))
    assert read_tiles(path, "card").by_key == {LORA: OTHER[LORA]}
    assert len(caplog.records) == 1 and "1 entries" in caplog.text
    path.write_text(json.dumps({"tables": {"card": entry}}))
    assert not read_tiles(path, "card").entries


# ---- programs --------------------------------------------------------------------------------------------------------
def text(lora: bool, key: StepKey, **changes) -> str:
    """A step of one layer of Llama-2-7B's shape as a card's compiler is given it."""
    spec = dataclasses.replace(step_programs.spec_of(1, lora), **changes)
    shapes = {path: jax.ShapeDtypeStruct(hf.shape, jnp.bfloat16) for path, hf in hf_plan(spec.model).items()}
    entry = step_entries(spec, tuple(shapes[path] for path in spec.definition.paths))[key]
    traced = jax.jit(entry.fn, donate_argnums=entry.donate).trace(*entry.args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def asked(key: StepKey, lora: bool) -> dict:
    seen = Recorder()
    text(lora, key, tiles=seen, lora_tiles=seen)
    return {k: candidates(k)[0] for k in seen.keys if k.rule in space.TUNED_RULES}


def test_steps_take_the_table_and_idle_lora_stays_the_plain_program():
    plain, with_adapters = StepKey("decode", 8), StepKey("decode", 8, lora=True)
    found = asked(plain, False)
    assert {k.rule for k in found} == {"matmul_tiles", "swiglu_tiles", "attention_tiles"} and len(found) == 5
    table = TileTable.of({**asked(with_adapters, True), **found})
    tuned = text(False, plain, tiles=table, lora_tiles=table)
    assert tuned != text(False, plain)
    for lora_tiles in (table, TileTable()):
        assert tuned == text(True, plain, tiles=table, lora_tiles=lora_tiles)
    assert text(True, with_adapters, tiles=table, lora_tiles=table) != text(True, with_adapters, tiles=table)
    assert text(True, with_adapters, tiles=table) == text(True, with_adapters)
    for key, t in found.items():  # each entry is in some program's code
        assert text(False, plain, tiles=TileTable.of({key: t})) != text(False, plain), key


# ---- an engine -------------------------------------------------------------------------------------------------------
LAYER_OPS = ("add_rms_norm", "skinny_matmul", "skinny_lora_matmul", "swiglu", "lora_swiglu", "residual_matmul")
CACHE_OPS = ("decode_attention", "prefill_attention", "rope_to_cache")
# What a step of one row asks for in the shape "tiny".
TINY = (
    Key("matmul_tiles", (1, 64, 128, 4, False)),
    Key("matmul_tiles", (1, 64, 64, 4, False)),
    Key("matmul_tiles", (1, 128, 64, 4, False)),
    Key("swiglu_tiles", (1, 64, 128, 4)),
    Key("attention_tiles", (1, 2, 2, 64, 16, 4)),
)


@pytest.fixture
def interpreted(monkeypatch):
    """Engines on this CPU run the kernels, interpreted, and may read what is stored."""
    for module, names in ((layers, LAYER_OPS), (kv_cache, CACHE_OPS)):
        for name in names:
            monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=True))
    setup = dataclasses.replace(set_up_device("cpu", "xla", 0.9), implementation="triton")
    monkeypatch.setattr(builder, "set_up_device", lambda *args: setup)
    monkeypatch.setattr(builder, "use_compilation_cache", lambda folder: folder)
    return setup


def engine(cache: str) -> LLM:
    sizes = dict(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64, num_pages=6)
    return LLM("tiny", load_format="dummy", disable_tqdm=True, compilation_cache_dir=cache, **sizes)


def tokens_and_hash(llm: LLM) -> tuple[list[int], str]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids
    hashes = {row["key"]: row["program_hash"] for row in llm.step_table.report()}
    return list(out), hashes["decode[1]"]


def test_an_engine_takes_a_stored_table_and_gives_the_same_tokens(interpreted, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "lora_jax")
    monkeypatch.setattr(tiles, "tiles_file", lambda cache: None if not cache else tmp_path / "tiles.json")
    plain = engine(str(tmp_path))
    want, program = tokens_and_hash(plain)
    assert plain.stats()["tuned_tiles"] == 0 and "from shapes alone" in caplog.text
    table = TileTable.of({key: candidates(key)[0] for key in TINY})
    write_tiles(tmp_path / "tiles.json", table_name(interpreted.device), table, set(TINY))
    tuned = engine(str(tmp_path))
    got, other = tokens_and_hash(tuned)
    assert got == want and len(set(want)) > 1 and other != program
    assert tuned.stats()["tuned_tiles"] == 5 and "in use, 5 entries" in caplog.text


def test_steps_that_do_not_compile_with_a_table_are_made_without(monkeypatch, caplog):
    table = TileTable.of(OTHER)
    tried: list[tuple[int, int]] = []
    failing: list[tuple[int, int]] = []

    def compile_all(args, spec, params):
        tried.append((len(spec.tiles.entries), len(spec.lora_tiles.entries)))
        if tried[-1] in failing:
            raise RuntimeError("shared memory")
        return "table"

    monkeypatch.setattr(builder, "_compile_all", compile_all)
    for lora, failing[:], want in (
        (False, [], [(4, 4)]),
        (False, [(4, 4)], [(4, 4), (0, 0)]),
        (True, [(4, 4)], [(4, 4), (4, 0)]),  # idle programs stay those of an engine without LoRA
        (True, [(4, 4), (4, 0)], [(4, 4), (4, 0), (0, 0)]),
    ):
        tried.clear()
        spec = dataclasses.replace(step_programs.spec_of(1, lora), tiles=table, lora_tiles=table)
        spec, made = builder._compile(None, spec, None)
        assert tried == want and made == "table" and (len(spec.tiles.entries), len(spec.lora_tiles.entries)) == want[-1]
    failing[:] = [(0, 0)]
    with pytest.raises(RuntimeError, match="shared memory"):
        builder._compile(None, step_programs.spec_of(1, True), None)


def test_no_table_without_kernels_or_cache(tmp_path, monkeypatch):
    setup = set_up_device("cpu", "xla", 0.9)
    monkeypatch.setattr(tiles, "tiles_file", lambda cache: None if not cache else tmp_path / "tiles.json")
    write_tiles(tmp_path / "tiles.json", table_name(setup.device), TileTable.of(OTHER), set(KEYS))
    assert not stored_tiles(str(tmp_path), setup).entries
    triton = dataclasses.replace(setup, implementation="triton")
    assert stored_tiles(str(tmp_path), triton).by_key == OTHER and not stored_tiles(None, triton).entries


def test_jax_without_its_cache_has_no_table(tmp_path):
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        for enabled, want in ((False, None), (True, tmp_path / "tiles.json")):
            jax.config.update("jax_enable_compilation_cache", enabled)
            assert tiles_file(str(tmp_path)) == want and tiles_file(None) is None
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_tiles(tmp_path / "link.json", "card", TileTable.of(OTHER), set(KEYS))
    assert (tmp_path / "link.json").is_symlink()
    assert read_tiles(tmp_path / "real.json", "card") == TileTable.of(OTHER)


def test_two_writers_lose_nothing(tmp_path):
    """Each call reads, changes and replaces the file."""
    path, names = tmp_path / "tiles.json", [f"card {i}" for i in range(24)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: write_tiles(path, name, TileTable.of(OTHER), set(KEYS)), names))
    assert all(read_tiles(path, name) == TileTable.of(OTHER) for name in names)


@pytest.mark.timeout(20)
def test_what_is_no_file_is_not_waited_for(tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        assert read_tiles(tmp_path / name, "card") == TileTable()
        with pytest.raises(OSError, match="no file"):
            write_tiles(tmp_path / name, "card", TileTable.of(OTHER), set(KEYS))
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("op", "key", "slices"),
    [
        ("residual", Key("matmul_tiles", (4, 512, 256, 4, False)), (64, 192)),
        ("swiglu", Key("swiglu_tiles", (4, 512, 256, 4)), (64, 192, 256)),
    ],
)
def test_stored_tiles_that_reach_over_a_slice_are_refused(op, key, slices):
    case = fused.Case(op, 4, 512, slices, "float32")
    table = TileTable.of({key: MatmulTiles(128, 32, 1, num_warps=4, num_stages=2)})
    fused.check(fused.make(case, [0, 1, -1, 3]), "interpret")
    with tiles_in_use(table), pytest.raises(ValueError, match="no multiples of a tile of 128"):
        fused.run(fused.make(case, [0, 1, -1, 3]), "interpret")
