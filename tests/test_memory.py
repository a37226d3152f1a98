"""The memory plan: what it chooses, and what it says when something does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lora_jax import LLM
from lora_jax.errors import AdapterError, CapacityError
from lora_jax.memory import GIB, MemoryPlan, Sizes, check_programs, plan_memory, round_pages
from lora_jax.models.checkpoint import Checkpoint
from tests.support import tiny

MIB = 2**20
SIZES = Sizes(weights=3 * GIB, lora_slots=GIB // 2, sampling_state=GIB // 4, programs=GIB // 8, page=MIB)


def plan(limit: int = 8 * GIB, sizes: Sizes = SIZES, **options: Any) -> MemoryPlan:
    defaults = dict(page_size=16, max_num_seqs=4, model_positions=4096, max_model_len=None, num_pages=None)
    return plan_memory(sizes, limit=limit, **{**defaults, **options})


def rows(text: str) -> dict[str, float]:
    """Name -> GiB, of every line of a plan."""
    lines = [line.rsplit(None, 2) for line in text.splitlines() if line.endswith(" GiB")]
    return {name.strip(): float(size) for name, size, _ in lines}


def check_refusal(error: Exception, sizes: Sizes, pages: int, limit: int) -> None:
    """Every item with its size, their total, the limit: in GiB with three places."""
    said = rows(str(error))
    assert said.pop("total") == pytest.approx((sizes.fixed + pages * sizes.page) / GIB, abs=6e-4)
    assert said.pop("limit") == pytest.approx(limit / GIB, abs=6e-4)
    want = dict(
        zip(
            ("weights", "LoRA slots", "sampling state", "programs (temporaries)", f"KV pages ({pages} x 16 tokens)"),
            (sizes.weights, sizes.lora_slots, sizes.sampling_state, sizes.programs, pages * sizes.page),
            strict=True,
        )
    )
    assert said == {name: pytest.approx(size / GIB, abs=6e-4) for name, size in want.items()}


def test_no_more_pages_than_the_rows_can_use():
    got = plan(limit=100 * GIB)
    assert got.max_model_len == 4096  # the model's, as it fits
    assert got.num_pages == 4 * 256 + 1  # page 0 is for padding
    assert plan(limit=100 * GIB, max_model_len=100).num_pages == 4 * 7 + 1


def test_the_rest_of_the_memory_becomes_pages():
    limit = SIZES.fixed + 500 * MIB
    got = plan(limit)
    assert got.num_pages == round_pages(500) == 480
    assert got.max_model_len == 4096  # one request of it fits: 257 pages
    assert sum(got.items().values()) <= limit


@pytest.mark.parametrize("room", [100, 40, 2])
def test_max_model_len_is_the_largest_that_fits(room):
    got = plan(SIZES.fixed + room * MIB)
    assert got.num_pages == round_pages(room)
    assert got.max_model_len == (got.num_pages - 1) * 16 < 4096
    one_more = got.max_model_len + 1
    with pytest.raises(CapacityError, match=f"max_model_len={one_more} needs {got.num_pages + 1} pages"):
        plan(SIZES.fixed + got.num_pages * MIB, max_model_len=one_more)


def test_max_model_len_from_an_explicit_number_of_pages():
    got = plan(num_pages=33)
    assert (got.num_pages, got.max_model_len) == (33, 512)  # as given, not rounded
    assert plan(num_pages=1000).max_model_len == 4096
    got = plan(num_pages=33, max_model_len=200)
    assert (got.num_pages, got.max_model_len) == (33, 200)


def test_pages_nobody_asked_for_are_limited():
    assert plan(kv_limit=200 * MIB).num_pages == round_pages(200)
    assert plan(kv_limit=200 * MIB, num_pages=300).num_pages == 300  # asked for
    assert plan(kv_limit=2000 * MIB).num_pages == 1025


def test_explicit_pages_that_do_not_fit():
    limit = SIZES.fixed + 99 * MIB
    with pytest.raises(CapacityError, match="lower num_pages, max_loras, max_lora_rank or max_num_batched") as e:
        plan(limit, num_pages=100)
    check_refusal(e.value, SIZES, 100, limit)
    assert plan(limit, num_pages=99).num_pages == 99


def test_a_wanted_length_that_does_not_fit():
    limit = SIZES.fixed + 16 * MIB
    with pytest.raises(CapacityError, match="lower max_model_len or raise gpu_memory_utilization") as e:
        plan(limit, max_model_len=1000)
    assert "max_model_len=1000 needs 64 pages" in str(e.value)
    check_refusal(e.value, SIZES, 16, limit)


def test_too_few_explicit_pages_for_one_request():
    with pytest.raises(CapacityError, match="max_model_len=1000 needs 64 pages.*raise num_pages") as e:
        plan(num_pages=63, max_model_len=1000)
    check_refusal(e.value, SIZES, 63, 8 * GIB)
    assert plan(num_pages=64, max_model_len=1000).num_pages == 64


@pytest.mark.parametrize("limit", [0, 3 * GIB, SIZES.fixed, SIZES.fixed + MIB])
def test_no_room_for_any_page(limit):
    """The weights alone are too large, or no page is left beside page 0."""
    with pytest.raises(CapacityError, match="max_loras, max_lora_rank") as e:
        plan(limit)
    check_refusal(e.value, SIZES, 1 if limit > SIZES.fixed else 0, limit)


@pytest.mark.parametrize("pages", [*range(1, 70), 1000, 4097, 123_456, 10**7])
def test_rounding(pages):
    got = round_pages(pages)
    assert got <= pages < got * 9 / 8 + 1  # at most an eighth is given up
    assert bin(got).rstrip("0").count("1") <= 4 and len(bin(got).rstrip("0")) - 2 <= 4  # four significant bits
    assert round_pages(got) == got


def test_rounding_hides_small_differences_and_none_is_none():
    assert round_pages(0) == 0
    assert [round_pages(n) for n in (15, 16, 17, 31, 32, 1000, 1010)] == [15, 16, 16, 30, 32, 960, 960]


def test_real_programs_replace_the_estimate():
    got = plan()
    real = check_programs(got, 7)
    assert real == dataclasses.replace(got, sizes=dataclasses.replace(SIZES, programs=7))
    left = got.limit - sum(got.items().values()) + SIZES.programs
    assert check_programs(got, left).sizes.programs == left
    with pytest.raises(CapacityError, match="lower max_num_batched_tokens, num_pages or max_num_seqs") as e:
        check_programs(got, left + 1)
    check_refusal(e.value, dataclasses.replace(SIZES, programs=left + 1), got.num_pages, got.limit)


# -- through LLM: refused before anything is loaded --


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save_base("llama", tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    ("options", "item", "advice"),
    [
        (dict(enable_lora=True, max_loras=10**8), "LoRA slots", "max_loras"),
        (dict(num_pages=10**9), "KV pages (1000000000 x 16 tokens)", "lower num_pages"),
    ],
)
def test_what_cannot_fit_is_refused_before_the_weights_load(base, monkeypatch, options, item, advice):
    monkeypatch.setattr(Checkpoint, "open", lambda *args: pytest.fail("weights were loaded"))
    with pytest.raises(CapacityError) as e:
        LLM(
            str(base),
            device="cpu",
            max_num_seqs=2,
            max_num_batched_tokens=32,
            max_model_len=64,
            disable_tqdm=True,
            **options,
        )
    said = rows(str(e.value))
    assert said[item] > said["limit"] > 0 and said["weights"] >= 0 and len(said) == 7
    assert advice in str(e.value).split("what to change: ")[1]


def test_sizes_are_those_of_the_real_arrays(base):
    """The plan counts weights, slots and pages exactly, or what it refuses means nothing."""
    import jax

    llm = LLM(
        str(base),
        device="cpu",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=4,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        num_pages=9,
        disable_tqdm=True,
    )
    held, sizes = llm.engine._runtime, llm.engine.memory_plan.sizes
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    assert size(held._params) == sizes.weights
    assert 2 * size(held._stacks) == sizes.lora_slots  # two slots, and as many adapters on their way
    assert size(held._kv) == 9 * sizes.page
    assert size(held._state) == sizes.sampling_state
    assert llm.step_table.temp_bytes() == sizes.programs > 0
    assert llm.engine.max_model_len == 8 * 16  # the largest that nine pages hold


def test_weights_that_leave_no_room_are_not_blamed_on_the_context():
    sizes = Sizes(weights=10 << 30, lora_slots=0, sampling_state=0, programs=0, page=1 << 20)
    with pytest.raises(CapacityError, match="no room for a KV cache: a smaller model") as refused:
        plan_memory(
            sizes,
            limit=9 << 30,
            page_size=16,
            max_num_seqs=8,
            model_positions=4096,
            max_model_len=None,
            num_pages=None,
        )
    assert "max_model_len=1" not in str(refused.value)


def test_a_huge_batch_is_advised_to_shrink():
    """Where the rows' state and the programs take most, the rows come first in the advice, and only there."""
    huge = dataclasses.replace(SIZES, sampling_state=20 * GIB, programs=10 * GIB)
    rows_first = "no room for a KV cache: a smaller max_num_seqs or max_num_batched_tokens, a smaller model"
    with pytest.raises(CapacityError, match=rows_first):
        plan(sizes=huge)
    with pytest.raises(CapacityError, match="lower num_pages, max_num_seqs, max_loras"):
        plan(huge.fixed + 9 * MIB, sizes=huge, num_pages=10)
    with pytest.raises(CapacityError, match="or lower max_num_seqs, max_num_batched_tokens, max_loras"):
        plan(huge.fixed + 16 * MIB, sizes=huge, max_model_len=1000)
    for limit, pages in ((GIB, None), (SIZES.fixed + 9 * MIB, 10)):
        with pytest.raises(CapacityError) as e:
            plan(limit, num_pages=pages)
        assert "max_num_seqs" not in str(e.value)


def test_adapters_named_at_start_are_checked_before_anything_compiles(tmp_path, monkeypatch):
    from lora_jax import builder

    monkeypatch.setattr(builder, "build_table", lambda *args, **kwargs: pytest.fail("compiled first"))
    with pytest.raises(AdapterError, match="nowhere"):
        LLM("tiny", load_format="dummy", max_lora_rank=8, lora_modules=[f"a={tmp_path}/nowhere"], device="cpu")
