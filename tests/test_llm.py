"""The whole path against transformers + PEFT: models, adapters, mixed batches, paging, chunks, preemption."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

from lora_jax import LLM, LoRARequest, SamplingParams
from lora_jax.errors import AdapterError, AdapterNotFoundError, ConfigError, LoraJaxError, RequestError
from lora_jax.plan import ScheduledRow
from lora_jax.request import Request
from lora_jax.step_keys import StepKey
from tests.support import tiny

TOLERANCE = 1e-3  # logits, float32 with exact products
GREEDY = dict(temperature=0.0, ignore_eos=True)
SMALL = dict(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, disable_tqdm=True)


def tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, n).tolist()


def prompt(ids: list[int]) -> dict:
    return {"prompt_token_ids": ids}


def check_against(oracle: tiny.Oracle, output) -> None:
    """Every reported log-probability, and each greedy token whose margin exceeds the tolerance."""
    want = oracle.check_greedy(output, TOLERANCE)
    for position, entry in enumerate(output.prompt_logprobs or []):
        for token, value in (entry or {}).items():
            assert abs(value.logprob - want[position - 1, token]) < TOLERANCE, (position, token)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    everything = [*tiny.ALL_LINEAR, "lm_head", "embed_tokens"]
    return {
        "all": tiny.save_adapter(base, root / "all", seed=1),
        "qv": tiny.save_adapter(base, root / "qv", seed=2, r=8, lora_alpha=4, target_modules=["q_proj", "v_proj"]),
        "odd": tiny.save_adapter(base, root / "odd", seed=3, r=3, use_rslora=True, rank_pattern={"down_proj": 5}),
        "head": tiny.save_adapter(base, root / "head", seed=4, r=2, target_modules=everything),
    }


@pytest.fixture(scope="module")
def oracles(base, adapters) -> dict[str | None, tiny.Oracle]:
    return {None: tiny.Oracle(base), **{name: tiny.Oracle(base, path) for name, path in adapters.items()}}


@pytest.fixture(scope="module")
def llm(base) -> LLM:
    """25 pages of 4 tokens: four long requests do not fit at once, so requests are preempted."""
    return LLM(
        str(base), enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=4, page_size=4, num_pages=26, **SMALL
    )


@pytest.fixture(autouse=True)
def nothing_is_lost(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        engine.step()  # takes aborts that were left
        engine.check_integrity()
        stats = engine.stats()
        assert stats["running"] == stats["waiting"] == 0 and stats["free_pages"] == 25, stats
        assert stats["compilations_after_warmup"] == 0
        for report in engine.list_loras():
            engine.unload_lora(report.name)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_each_architecture_equals_transformers(name, tmp_path):
    path = tiny.save_base(name, tmp_path / "base")
    adapter = tiny.save_adapter(path, tmp_path / "adapter", target_modules=[*tiny.ALL_LINEAR, "lm_head"])
    llm = LLM(str(path), enable_lora=True, max_loras=1, **{**SMALL, "max_num_seqs": 2})
    params = SamplingParams(max_tokens=12, prompt_logprobs=5, **GREEDY)
    prompts = [prompt(tokens(0, 20)), prompt(tokens(1, 9))]
    for lora, oracle in ((None, tiny.Oracle(path)), (LoRARequest("a", 1, str(adapter)), tiny.Oracle(path, adapter))):
        for output in llm.generate(prompts, params, lora, use_tqdm=False):
            check_against(oracle, output)


def test_a_mixed_batch_equals_each_row_alone(llm, adapters, oracles):
    for name, path in adapters.items():
        llm.load_lora(name, str(path))
    before = {r["key"]: r["hits"] for r in llm.step_table.report()}
    names = [None, "all", "qv", None, "odd", "head", "all", None]  # twice the slots
    prompts = [prompt(tokens(i, 5 + 3 * i)) for i in range(len(names))]
    params = SamplingParams(max_tokens=20, prompt_logprobs=3, logprobs=3, **GREEDY)
    loras = [name and LoRARequest(name) for name in names]
    outputs = llm.generate(prompts, params, loras, use_tqdm=False)
    for name, p, output in zip(names, prompts, outputs, strict=True):
        assert output.prompt_token_ids == p["prompt_token_ids"]
        check_against(oracles[name], output)
        others = [o for n, o in oracles.items() if n != name]
        assert all(np.abs(oracles[name].logits([5, 6]) - o.logits([5, 6])).max() > 100 * TOLERANCE for o in others)
    hits = {r["key"]: r["hits"] - before[r["key"]] for r in llm.step_table.report()}
    assert sum(n for key, n in hits.items() if key.startswith("decode") and "lora" in key) > 0
    base_only = llm.generate(prompts[:1], params, use_tqdm=False)[0]
    after = {r["key"]: r["hits"] - before[r["key"]] - hits[r["key"]] for r in llm.step_table.report()}
    assert not any(n for key, n in after.items() if "lora" in key), "a batch without adapters ran a LoRA program"
    check_against(oracles[None], base_only)


def test_long_prompts_are_chunked_and_crowded_requests_preempted(llm, adapters, oracles):
    llm.load_lora("qv", str(adapters["qv"]))
    preemptions = llm.stats()["preemptions"]
    names = [None, "qv", None, "qv"]
    prompts = [prompt(tokens(20 + i, n)) for i, n in enumerate((70, 33, 50, 20))]  # chunks hold 32
    outputs = llm.generate(
        prompts,
        SamplingParams(max_tokens=25, prompt_logprobs=2, **GREEDY),
        [n and LoRARequest(n) for n in names],
        use_tqdm=False,
    )
    assert llm.stats()["preemptions"] > preemptions
    for name, output in zip(names, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 25
        check_against(oracles[name], output)


def test_rows_are_bit_equal_whatever_their_neighbours_are(llm, adapters):
    """One StepKey, other rows and adapters changed: the same log-probabilities to the last bit."""
    for name in ("all", "qv"):
        llm.load_lora(name, str(adapters[name]))
    params = SamplingParams(max_tokens=6, logprobs=20, **GREEDY)
    mine = prompt(tokens(0, 7))

    def run(lora, neighbours):
        prompts = [mine, *(prompt(tokens(50 + i, 7)) for i in range(3))]
        loras = [lora and LoRARequest(lora), *(n and LoRARequest(n) for n in neighbours)]
        llm.reset_prefix_cache()
        return llm.generate(prompts, params, loras, use_tqdm=False)[0].outputs[0]

    run("all", ("qv",) * 3)  # both lie in slots from now on: all requests of a run begin together
    for lora in (None, "all"):
        runs = [run(lora, n) for n in (("qv", "qv", "all"), ("all", "qv", None), (None, "all", "qv"))]
        assert runs[0].token_ids == runs[1].token_ids == runs[2].token_ids
        assert runs[0].logprobs == runs[1].logprobs == runs[2].logprobs


def test_a_name_is_not_an_identity(llm, adapters, oracles, tmp_path):
    """New weights under an old name: new requests get them; a request in flight keeps the old ones."""
    folder = tmp_path / "tenant"
    shutil.copytree(adapters["all"], folder)
    llm.load_lora("tenant", str(folder))
    engine, params = llm.engine, SamplingParams(max_tokens=12, **GREEDY)
    ids = tokens(3, 8)
    old = engine.make_request(prompt(ids), params, LoRARequest("tenant"))
    engine.add_request(old)
    for _ in range(4):
        engine.step()
    shutil.rmtree(folder)
    shutil.copytree(adapters["qv"], folder)
    with pytest.raises(AdapterError, match="tenant"):
        llm.load_lora("tenant", str(folder))
    llm.load_lora("tenant", str(folder), replace=True)
    new = llm.generate([prompt(ids)], params, LoRARequest("tenant"), use_tqdm=False)[0]
    while engine.has_unfinished():
        engine.step()
    for name, got in (("all", old.output_token_ids), ("qv", new.outputs[0].token_ids)):
        want, margin = oracles[name].greedy(ids, 12)
        assert margin > TOLERANCE and got == want, name


def test_unloading_while_requests_run_frees_the_slot_afterwards(llm, adapters, oracles):
    llm.load_lora("all", str(adapters["all"]))
    engine, params, ids = llm.engine, SamplingParams(max_tokens=10, **GREEDY), tokens(4, 6)
    running = engine.make_request(prompt(ids), params, LoRARequest("all"))
    engine.add_request(running)
    engine.step()
    engine.unload_lora("all")
    with pytest.raises(AdapterNotFoundError, match="all"):
        engine.make_request(prompt(ids), params, LoRARequest("all"))
    while engine.has_unfinished():
        engine.step()
    assert running.output_token_ids == oracles["all"].greedy(ids, 10)[0]
    for name in ("qv", "odd"):  # both slots are free again
        llm.load_lora(name, str(adapters[name]))
        out = llm.generate([prompt(ids)], params, LoRARequest(name), use_tqdm=False)[0]
        check_against(oracles[name], out)


def test_adapters_come_and_go_without_a_compilation(llm, adapters):
    before = llm.stats()
    for name, path in itertools.islice(itertools.cycle(adapters.items()), 8):
        llm.load_lora(name, str(path))
        llm.generate([prompt(tokens(0, 4))], SamplingParams(max_tokens=2, **GREEDY), LoRARequest(name), use_tqdm=False)
        llm.unload_lora(name)
    after = llm.stats()
    assert after["slot_writes"] - before["slot_writes"] == 8 and after["loras"] == []
    assert after["compilations_after_warmup"] == 0


def test_no_step_copies_the_cache(llm):
    """Pages are written in place in every step, whatever its bucket."""
    import re

    shape = ",".join(map(str, llm.engine._runtime._kv[0].shape))
    flat = ",".join(map(str, (26 * 4, *llm.engine._runtime._kv[0].shape[2:])))
    for key in llm.step_table.keys():
        if key.phase in ("decode", "prefill"):
            text = llm.step_table.compiled(key).as_text()
            copies = re.findall(rf"= f32\[(?:{shape}|{flat})\]\S* copy\(", text)
            assert not copies and f"f32[{shape}]" in text, (str(key), copies)


def test_greedy_tokens_need_no_program_of_their_own(llm, oracles):
    seen = []  # each run has a long prompt of its own, which no run before has computed

    def run(**params) -> tuple[list[int], dict[str, int]]:
        before = {r["key"]: r["hits"] for r in llm.step_table.report()}
        more = SamplingParams(**{**GREEDY, "max_tokens": 6, **params})
        both = [SamplingParams(max_tokens=6, **GREEDY), more]
        output = llm.generate([prompt(tokens(0, 5)), prompt(tokens(900 + len(seen), 40))], both, use_tqdm=False)[0]
        seen.append(output)
        ran = {r["key"]: r["hits"] - before[r["key"]] for r in llm.step_table.report() if r["hits"] > before[r["key"]]}
        return output.outputs[0].token_ids, ran

    want, margin = oracles[None].greedy(tokens(0, 5), 6)
    assert margin > TOLERANCE
    steps = lambda ran, phase: sum(n for key, n in ran.items() if key.startswith(phase))  # noqa: E731
    for params, sampled in ({}, 0), (dict(min_tokens=2), 2), (dict(temperature=1.0, seed=1), 6), (dict(logprobs=1), 6):
        got, ran = run(**params)
        assert got == want, "the greedy row beside it"
        assert steps(ran, "sample") == sampled and steps(ran, "prefill") > 1 and steps(ran, "decode") > 5, (params, ran)


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_leaves_its_tokens_on_the_rows_that_sample(llm, lora):
    runtime, before = llm.engine._runtime, np.array([3, 4, 5, 6, 7], np.int32)
    requests = [Request(str(row), tokens(row, 9), SamplingParams(), row=row) for row in (2, 1)]
    for i, request in enumerate(requests):
        request.pages = [3 * i + 1, 3 * i + 2, 3 * i + 3]

    def run(phase, bucket: int, *inputs) -> tuple[np.ndarray, list[int], list[int]]:
        key = StepKey(phase, bucket, lora)
        head, tail = runtime._lora_args(key, ())
        kv, *_ = llm.step_table[StepKey("init", 1)]()  # pages of its own: a step takes them
        chosen, logits, *_, after, _ = llm.step_table[key](*head, kv, before, *inputs, *tail)
        return np.asarray(logits), chosen.tolist(), after.tolist()

    builder = runtime.spec.builder
    rows = [ScheduledRow(requests[0], 0, 9, True, 0), ScheduledRow(requests[1], 0, 6, False, 0)]
    logits, chosen, after = run("prefill", 32, *builder.prefill(rows, 32))
    assert chosen == logits.argmax(-1).tolist() and after[:4] == [3, 4, chosen[0], 6] and chosen[0] != 5
    table = builder.table()
    table.update(rows)
    rows = [ScheduledRow(request, 8, 1, True, 0) for request in requests]
    logits, chosen, after = run("decode", 4, builder.decode(rows, 4, table))
    assert chosen == logits.argmax(-1).tolist() and after[:4] == [3, chosen[1], chosen[0], 6]
    assert chosen[0] not in (5, chosen[1])


@pytest.mark.parametrize("names", [(None, "head"), ("head", None)])
def test_the_first_token_has_the_head_of_its_own_adapter(llm, adapters, oracles, names):
    """Two prompts of one prefill step."""
    llm.load_lora("head", str(adapters["head"]))
    prompts, params = [prompt(tokens(i, 9)) for i in range(2)], SamplingParams(max_tokens=1, logprobs=5, **GREEDY)
    outputs = llm.generate(prompts, params, [name and LoRARequest(name) for name in names], use_tqdm=False)
    for name, output in zip(names, outputs, strict=True):
        want = oracles[name].logprobs(output.prompt_token_ids)[-1]
        assert all(abs(at.logprob - want[token]) < TOLERANCE for token, at in output.outputs[0].logprobs[0].items())


def test_the_compilation_counter_counts(llm):
    import jax

    before = llm.stats()["compilations_after_warmup"]
    jax.jit(lambda x: x * 3 + 1)(np.float32(2)).block_until_ready()
    try:
        assert llm.stats()["compilations_after_warmup"] > before
    finally:
        llm.engine._compiled_at_start += llm.stats()["compilations_after_warmup"] - before


def test_logits_that_are_not_finite_fail_one_request_alone(llm, base, adapters, oracles, tmp_path):
    """Weights that are finite but overflow the logits: their request fails, its neighbours do not notice."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "huge"
    shutil.copytree(adapters["all"], folder)
    weights = {k: v * np.float32(1e18) for k, v in load_file(folder / "adapter_model.safetensors").items()}
    save_file(weights, folder / "adapter_model.safetensors")
    llm.load_lora("huge", str(folder))
    engine, params, ids = llm.engine, SamplingParams(max_tokens=6, **GREEDY), tokens(9, 6)
    requests = [engine.make_request(prompt(ids), params, r) for r in (None, LoRARequest("huge"), None)]
    for request in requests:
        engine.add_request(request)
    errors = {}
    while engine.has_unfinished():
        for out in engine.step():
            if out.error is not None:
                errors[out.request_id] = out.error
    assert list(errors) == [requests[1].request_id] and "huge" in str(errors[requests[1].request_id])
    for request in (requests[0], requests[2]):
        assert request.output_token_ids == oracles[None].greedy(ids, 6)[0]
    again = llm.generate([prompt(ids)], params, use_tqdm=False)[0]  # in the pages that held the NaN
    assert again.outputs[0].token_ids == oracles[None].greedy(ids, 6)[0]


def test_abort_frees_everything(llm):
    engine = llm.engine
    requests = [engine.make_request(prompt(tokens(i, 10)), SamplingParams(max_tokens=50, **GREEDY)) for i in range(6)]
    for request in requests:
        engine.add_request(request)
    engine.step()
    for request in requests:
        engine.abort(request.request_id)
        engine.abort(request.request_id)
    reasons = [out.finish_reason for out in engine.step()]
    assert reasons == ["abort"] * 6 and not engine.has_unfinished()


def test_stop_ids_end_tokens_and_lengths(llm, oracles):
    ids = tokens(5, 6)
    want, _ = oracles[None].greedy(ids, 10)
    at = want.index(want[4])
    run = lambda **kw: llm.generate([prompt(ids)], SamplingParams(temperature=0, max_tokens=10, **kw), use_tqdm=False)  # noqa: E731
    out = run(stop_token_ids=[want[4]], ignore_eos=True)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (want[: at + 1], "stop", want[4])
    out = run(ignore_eos=True)[0].outputs[0]
    assert (out.token_ids, out.finish_reason) == (want, "length")
    out = llm.generate([prompt(tokens(6, 90))], SamplingParams(max_tokens=None, **GREEDY), use_tqdm=False)[0].outputs[0]
    assert len(out.token_ids) == 6 and out.finish_reason == "length"  # max_model_len is 96


def test_seeds_and_penalties(llm):
    prompts = [prompt(tokens(7, 5))] * 3
    params = [SamplingParams(temperature=1.5, seed=s, max_tokens=12, ignore_eos=True) for s in (1, 2, 1)]
    a, b, c = (o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False))
    assert a == c and a != b
    alone = llm.generate(prompts[:1], params[0], use_tqdm=False)[0].outputs[0].token_ids
    assert alone == a, "a request's draws depend on its neighbours"
    strong = SamplingParams(
        frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1e6, max_tokens=20, **GREEDY
    )
    out = llm.generate(prompts[:1], strong, use_tqdm=False)[0]
    seen = out.prompt_token_ids + out.outputs[0].token_ids
    assert len(set(out.outputs[0].token_ids)) == 20 and len(set(seen)) == len(set(out.prompt_token_ids)) + 20


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda llm: llm.generate([prompt([])]), "empty"),
        (lambda llm: llm.generate([prompt([tiny.VOCAB])]), str(tiny.VOCAB)),
        (lambda llm: llm.generate([prompt([1.5])]), "1.5"),
        (lambda llm: llm.generate([{"text": "x"}]), "prompt_token_ids"),
        (lambda llm: llm.generate(["text"]), "tokenizer"),
        (lambda llm: llm.generate([prompt([5] * 96)]), "96"),
        (lambda llm: llm.generate([prompt([5])], SamplingParams(logprobs=21)), "max_logprobs"),
        (lambda llm: llm.generate([prompt([5])], SamplingParams(stop="x")), "stop"),
        (lambda llm: llm.generate([prompt([5])] * 2, [SamplingParams()]), "2 prompts"),
        (lambda llm: llm.generate([prompt([5])], lora_request=LoRARequest("nobody")), "nobody"),
        (lambda llm: llm.generate([prompt([5])], lora_request=LoRARequest("x", 1, "missing-folder")), "missing-folder"),
    ],
)
def test_bad_requests_name_what_is_wrong(llm, bad, message):
    with pytest.raises((RequestError, AdapterError, AdapterNotFoundError), match=message):
        bad(llm)
    assert not llm.engine.has_unfinished()


def test_options_that_do_not_exist_are_errors(base):
    with pytest.raises(ConfigError, match="max_lora_rank"):
        LLM(str(base), max_lora_ranks=4)
    with pytest.raises(ConfigError, match="enforce_eager.*vLLM"):
        LLM(str(base), enforce_eager=True)
    with pytest.raises(LoraJaxError, match="max_position_embeddings"):
        LLM(str(base), max_model_len=1000)


def test_an_engine_without_lora_refuses_adapters(base, adapters):
    llm = LLM(str(base), **{**SMALL, "max_num_seqs": 1})
    with pytest.raises(RequestError, match="enable_lora"):
        llm.generate([prompt([5])], lora_request=LoRARequest("all", 1, str(adapters["all"])))
    with pytest.raises(AdapterError, match="enable_lora"):
        llm.load_lora("all", str(adapters["all"]))
