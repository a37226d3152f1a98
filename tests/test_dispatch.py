"""The dispatch table: compiled executables by key, which never compile again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from lora_jax.dispatch import Entry, StepTable, compilations, program_hash
from lora_jax.errors import StepKeyError

f32 = jnp.float32


def aval(*shape: int, dtype: Any = f32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def table(**entries: Entry) -> StepTable:
    return StepTable.build(entries, threads=2)


def compiled(fn: Callable, *args: Any) -> Any:
    return jax.jit(fn).lower(*args).compile()


def test_a_hit_runs_and_counts_and_a_miss_names_what_there_is():
    t = table(double=Entry(lambda x: x * 2, (aval(3),)), sum=Entry(lambda x, y: x + y, (aval(2), aval(2))))
    assert t.keys() == ["double", "sum"] and len(t) == 2
    for _ in range(3):
        assert t["double"](np.ones(3, np.float32)).tolist() == [2, 2, 2]
    with pytest.raises(StepKeyError, match="no executable for triple; the table holds double, sum"):
        t["triple"]
    assert isinstance(t.compiled("sum"), jax.stages.Compiled)
    assert {row["key"]: row["hits"] for row in t.report()} == {"double": 3, "sum": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        np.ones(4, np.float32),
        np.ones((1, 3), np.float32),
        np.ones(3, np.int32),
        (np.ones(3, np.float32),),
    ],
    ids=["size", "rank", "dtype", "tree"],
)
def test_wrong_arguments_raise_and_compile_nothing(wrong):
    t = table(double=Entry(lambda x: x * 2, (aval(3),)))
    before = compilations()
    with pytest.raises(TypeError):
        t["double"](wrong)
    with pytest.raises(TypeError):
        t["double"]()
    assert compilations() == before
    assert t["double"](np.ones(3, np.float32)).tolist() == [2, 2, 2]


def test_compilations_counts_every_one_and_only_those():
    x = np.float32(3)
    jitted = jax.jit(lambda x: jnp.sin(x) * 0.12345 + x)
    before = compilations()
    jitted(x).block_until_ready()
    assert compilations() == before + 1
    jitted(x + 1).block_until_ready()
    assert compilations() == before + 1
    t = table(**{str(i): Entry(lambda x, i=i: x + i, (aval(),)) for i in range(5)})
    assert compilations() == before + 6
    t["4"](x)
    assert compilations() == before + 6


def test_donated_arguments_are_given_up():
    def step(w, kv):
        return w.sum(), kv + 1

    t = table(keep=Entry(step, (aval(2), aval(4))), donate=Entry(step, (aval(2), aval(4)), donate=(1,)))
    w, kv = jnp.ones(2), jnp.zeros(4)
    t["keep"](w, kv)
    assert not kv.is_deleted()
    total, new = t["donate"](w, kv)
    assert kv.is_deleted() and not w.is_deleted()
    assert new.tolist() == [1] * 4 and float(total) == 2
    with pytest.raises((RuntimeError, ValueError), match="(?i)deleted|donated"):
        t["donate"](w, kv)


def test_report_says_what_each_executable_is():
    t = table(
        small=Entry(lambda x: x + 1, (aval(4),)),
        large=Entry(lambda x: jnp.sort(jnp.tanh(x @ x.T), 0)[::7] @ x, (aval(256, 16),)),
    )
    small, large = t.report()
    assert set(small) == {"key", "compile_seconds", "temp_bytes", "program_hash", "hits"}
    assert (small["key"], large["key"]) == ("small", "large")
    assert small["compile_seconds"] > 0 and large["compile_seconds"] > 0
    assert small["temp_bytes"] < large["temp_bytes"] == t.temp_bytes()
    assert large["temp_bytes"] >= 256 * 256 * 4  # x @ x.T
    assert small["program_hash"] == program_hash(t.compiled("small")) != large["program_hash"]
    assert StepTable.build({}).report() == [] and StepTable.build({}).temp_bytes() == 0


# -- what the worker threads enter --


def test_matmul_precision_is_entered_in_the_workers():
    dot = Entry(lambda a, b: a @ b, (aval(8, 8), aval(8, 8)))
    lowered: dict[str | None, str] = {}

    def seen(name: str | None) -> Callable:
        def fn(a, b):
            lowered[name] = str(jax.make_jaxpr(jnp.matmul)(a, b))
            return a @ b

        return fn

    for precision in (None, "highest"):
        StepTable.build({"dot": Entry(seen(precision), dot.args)}, matmul_precision=precision)
    assert "HIGHEST" not in lowered[None] and "HIGHEST" in lowered["highest"]
    assert jax.config.jax_default_matmul_precision is None, "the caller's setting has changed"


def test_the_mesh_is_entered_in_the_workers():
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:1])
    entry = Entry(lambda x: jax.lax.with_sharding_constraint(x * 2, PartitionSpec("tp")), (aval(4),))
    out = StepTable.build({"step": entry}, mesh=mesh)["step"](np.ones(4, np.float32))
    assert out.tolist() == [2] * 4
    with pytest.raises(RuntimeError, match="mesh"):
        StepTable.build({"step": entry})
    assert jax.sharding.get_abstract_mesh().empty, "the caller's mesh has changed"


def test_compiler_options_reach_their_own_entry():
    good = Entry(lambda x: x + 1, (aval(2),), compiler_options={"xla_embed_ir_in_executable": True})
    assert table(good=good)["good"](np.zeros(2, np.float32)).tolist() == [1, 1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        table(bad=Entry(lambda x: x + 1, (aval(2),), compiler_options={"xla_no_such_option": 1}))


# -- order and failures --


def test_a_wave_is_compiled_in_parallel_and_waves_follow_each_other():
    meeting = threading.Barrier(2, timeout=60)  # breaks when only one worker comes
    order: list[str] = []

    def entry(name: str, wave: int) -> Entry:
        def fn(x):
            assert threading.current_thread() is not threading.main_thread()
            meeting.wait()
            order.append(f"traced {name}")
            return x + 1

        return Entry(fn, (aval(2),), wave=wave)

    entries = {"d": entry("d", 7), "a": entry("a", 0), "c": entry("c", 7), "b": entry("b", 0)}
    t = StepTable.build(entries, threads=2, progress=lambda key: order.append(f"done {key}"))
    assert set(order[:4]) == {"traced a", "traced b", "done a", "done b"}
    assert set(order[4:]) == {"traced c", "traced d", "done c", "done d"}
    assert t.keys() == list(entries), "the report is in the order of the entries"


def test_an_entry_that_cannot_compile_ends_the_build():
    traced: list[int] = []

    def fn(i: int) -> Callable:
        def step(x):
            traced.append(i)
            if i == 1:
                raise ValueError("the step is wrong")
            return x + i

        return step

    entries = {i: Entry(fn(i), (aval(2),), wave=i // 20) for i in range(40)}
    with pytest.raises(ValueError, match="the step is wrong"):
        StepTable.build(entries, threads=1)
    assert len(traced) < 20 and max(traced) < 20, f"went on with {traced[2:]}"


def test_a_failure_of_the_progress_bar_is_not_swallowed():
    def progress(key):
        raise OSError("the pipe is broken")

    with pytest.raises(OSError, match="the pipe"):
        StepTable.build({"a": Entry(lambda x: x + 1, (aval(2),))}, progress=progress)


# -- program_hash --


def decode_step(params, tokens):
    hidden = jnp.tanh(params[0] @ tokens)
    return jax.nn.softmax(params[1] @ hidden), jnp.sort(hidden)


@jax.jit
def _inner(w, x):
    return jnp.tanh(w @ x)


def other_name(weights, x):
    """As decode_step: other names, other lines, an inner jit."""

    y = jnp.tanh(weights[0] @ x)

    return jax.nn.softmax(weights[1] @ y), jnp.sort(y)


ARGS = ((aval(8, 8), aval(8, 8)), aval(8))


def test_names_and_lines_do_not_change_a_programs_hash():
    assert program_hash(compiled(decode_step, *ARGS)) == program_hash(compiled(other_name, *ARGS))
    assert program_hash(compiled(decode_step, *ARGS)) == program_hash(compiled(lambda p, t: decode_step(p, t), *ARGS))


def _variant(scale: float = 1.0, flip: bool = False, twice: bool = False) -> Callable:
    def step(params, tokens):
        a, b = params[::-1] if flip else params
        hidden = jnp.tanh(a @ tokens) * scale
        hidden = jnp.tanh(hidden) if twice else hidden
        return jax.nn.softmax(b @ hidden), jnp.sort(hidden)

    return step


def test_what_a_program_does_changes_its_hash():
    variants = {
        "plain": compiled(_variant(2.0), *ARGS),
        "constant": compiled(_variant(2.000001), *ARGS),
        "operands": compiled(_variant(2.0, flip=True), *ARGS),
        "op": compiled(_variant(2.0, twice=True), *ARGS),
        "dtype": compiled(_variant(2.0), (aval(8, 8, dtype=jnp.bfloat16),) * 2, aval(8, dtype=jnp.bfloat16)),
        "shape": compiled(_variant(2.0), (aval(16, 8), aval(8, 16)), aval(8)),
        "donation": jax.jit(_variant(2.0), donate_argnums=1).lower(*ARGS).compile(),
    }
    hashes = {name: program_hash(c) for name, c in variants.items()}
    assert len(set(hashes.values())) == len(hashes), hashes
    assert program_hash(compiled(_variant(2.0), *ARGS)) == hashes["plain"]
