"""Shapes and adapter mixes, written once for tests, benchmarks and tuning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIXES = ("distinct", "uniform", "zipf", "identical", "skewed", "none")
DECODE_ROWS, PREFILL_ROWS = 8, 500  # the second is no multiple of any tile


@dataclass(frozen=True)
class Linear:
    """A linear layer, or several fused into one: `inputs` features, output slices of these widths."""

    name: str
    inputs: int
    slices: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One call: `rows` tokens through `linear`, adapters of `rank` (a power of two) in `slots` slots, mixed as `mix`."""

    linear: Linear
    rows: int
    rank: int
    mix: str
    dtype: str = "bfloat16"
    slots: int = 8
    layers: int = 2

    @property
    def id(self) -> str:
        return f"{self.linear.name}-t{self.rows}-r{self.rank}-{self.mix}-{self.dtype}"

    def slot_ids(self, seed: int = 0) -> np.ndarray:
        return slot_ids(self.mix, self.rows, self.slots, seed)


def slot_ids(mix: str, rows: int, slots: int, seed: int = 0) -> np.ndarray:
    """int32 [rows] in [-1, slots). Each mix other than "identical" and "none" has rows without an adapter where rows > 1.

    distinct: as many adapters as there are; uniform: each row any adapter or none; zipf: few adapters do most of the work;
    identical: one adapter, the last slot; skewed: nine rows of ten slot 0, the others any; none: no adapter.
    """
    rng = np.random.default_rng(seed)
    if mix == "distinct":
        ids = rng.permutation(np.arange(rows) % (slots + 1)) - (1 if rows > 1 else 0)
    elif mix == "uniform":
        ids = rng.integers(-1, slots, rows)
    elif mix == "zipf":
        weights = 1.0 / np.arange(1, slots + 2)
        ids = rng.choice(slots + 1, rows, p=weights / weights.sum()) - 1
    elif mix == "identical":
        ids = np.full(rows, slots - 1)
    elif mix == "skewed":
        ids = np.where(rng.random(rows) < 0.9, 0, rng.integers(-1, slots, rows))
    elif mix == "none":
        ids = np.full(rows, -1)
    else:
        raise ValueError(f"mix must be one of {MIXES}, got {mix!r}")
    if mix in ("uniform", "zipf", "skewed") and rows > 1:
        ids[0] = -1
    return np.minimum(ids, slots - 1).astype(np.int32)


def _decoder(name: str, hidden: int, kv: int, mlp: int, vocab: int) -> tuple[Linear, ...]:
    return (
        Linear(f"{name}.qkv", hidden, (hidden, kv, kv)),
        Linear(f"{name}.o", hidden, (hidden,)),
        Linear(f"{name}.gate_up", hidden, (mlp, mlp)),
        Linear(f"{name}.down", mlp, (hidden,)),
        Linear(f"{name}.lm_head", hidden, (vocab,)),
    )


MODELS = {
    "llama2-7b": _decoder("llama2-7b", 4096, 4096, 11008, 32000),
    "llama3-8b": _decoder("llama3-8b", 4096, 1024, 14336, 128256),
    "qwen2-0.5b": _decoder("qwen2-0.5b", 896, 128, 4864, 151936),
    "smollm2-135m": _decoder("smollm2-135m", 576, 192, 1536, 49152),
    "tiny": (
        Linear("tiny.qkv", 64, (64, 32, 32)),
        Linear("tiny.odd", 96, (264,)),
        Linear("tiny.ragged", 40, (24, 5, 100)),
    ),
}
LINEARS = {linear.name: linear for linears in MODELS.values() for linear in linears}


def _cases() -> tuple[Case, ...]:
    mixes = [mix for mix in MIXES if mix != "none"]
    big = [linear for model, linears in MODELS.items() if model != "tiny" for linear in linears]
    big.remove(LINEARS["llama3-8b.o"])  # equals llama2-7b.o
    out = [Case(linear, DECODE_ROWS, 16, mixes[i % len(mixes)]) for i, linear in enumerate(big)]
    # Only the last row of each prompt reaches lm_head, so it sees few rows always.
    prefill = [linear for linear in big if not linear.name.endswith("lm_head")]
    out += [Case(linear, PREFILL_ROWS, 16, mixes[i % len(mixes)]) for i, linear in enumerate(prefill[::2])]
    qkv = LINEARS["smollm2-135m.qkv"]
    out += [Case(qkv, rows, rank, "uniform") for rows in (5, 130) for rank in (1, 8, 64, 256)]
    out += [Case(qkv, rows, 32, "distinct", dtype) for rows in (33, 70) for dtype in ("float16", "float32")]
    for i, linear in enumerate(MODELS["tiny"]):
        out += [Case(linear, rows, 8, mix, "float32") for rows, mix in ((1, "identical"), (7, mixes[i]), (70, "zipf"))]
    return tuple(dict.fromkeys(out))


CASES = _cases()


@dataclass(frozen=True)
class AttentionCase:
    """One decode attention: `rows` sequences of up to pages * page_size tokens."""

    name: str
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    window: int | None = None
    dtype: str = "bfloat16"
    softcap: float | None = None


ATTENTION_CASES = (
    AttentionCase("llama2-7b", 8, 32, 32, 128, 16, 16),
    AttentionCase("llama3-8b-one-row", 1, 32, 8, 128, 16, 64),
    AttentionCase("qwen2-0.5b", 3, 14, 2, 64, 16, 20),
    AttentionCase("smollm2-135m-window", 5, 9, 3, 64, 16, 20, window=50, dtype="float32"),
    AttentionCase("tiny", 2, 4, 2, 16, 4, 20, dtype="float32"),
    AttentionCase("odd-head-window", 2, 4, 4, 24, 4, 30, window=8, dtype="float32"),
    AttentionCase("float16", 4, 8, 1, 80, 32, 5, dtype="float16"),
    AttentionCase("softcap-one-head-a-group", 3, 2, 2, 32, 4, 30, dtype="float32", softcap=1.5),
    AttentionCase("softcap-window", 3, 8, 4, 256, 16, 10, window=40, softcap=1.5),
)


# ---- what is timed, beside any of the above ---------------------------------------------------------------------------
def _timed_cases() -> tuple[Case, ...]:
    linears = [linear for linear in MODELS["llama2-7b"] if not linear.name.endswith("lm_head")]
    decode = [Case(linear, rows, 16, "distinct") for rows in (8, 64) for linear in linears]
    mixes = [Case(LINEARS["llama2-7b.qkv"], 8, 16, mix) for mix in ("identical", "none")]
    return (*decode, *mixes, Case(LINEARS["llama2-7b.qkv"], PREFILL_ROWS, 16, "distinct"))


TIMED_CASES = _timed_cases()
# The largest has 2.1 GB of keys and values: too much for the float64 form that ATTENTION_CASES are compared with.
TIMED_ATTENTION = (
    AttentionCase("llama2-7b-b8-c256", 8, 32, 32, 128, 16, 16),
    AttentionCase("llama2-7b-b8-c2048", 8, 32, 32, 128, 16, 128),
    AttentionCase("llama2-7b-b64-c2048", 64, 32, 32, 128, 16, 128),
    AttentionCase("llama3-8b-b64-c2048", 64, 32, 8, 128, 16, 128),
    AttentionCase("smollm2-135m-b8-c256", 8, 9, 3, 64, 16, 16),
)
