"""`bench overhead --more-adapters`: what it takes for a kind of adapters, and what it refuses."""

from __future__ import annotations

import re

import pytest

from lora_jax.bench import overhead
from lora_jax.bench.adapter_kinds import AdapterKind
from lora_jax.bench.cli import add_subcommands
from lora_jax.cli_args import OptionParser
from lora_jax.errors import ConfigError


def parse(*more: str):
    parser = OptionParser()
    add_subcommands(parser)
    return parser.parse_all(["overhead", "--model", "tiny", "--load-format", "dummy", *more])


def test_ranks_come_in_turn():
    kind = AdapterKind.parse("8,64,16:q_proj,v_proj")
    assert kind == AdapterKind((8, 64, 16), ("q_proj", "v_proj")) and [kind.rank(i) for i in (0, 4, 5)] == [8, 64, 16]
    assert kind.of(5) == "5 adapters of ranks 8, 16, 64 on q_proj, v_proj"
    assert AdapterKind.parse("4").of(1) == "1 adapter of rank 4"


def test_bytes_are_those_of_the_linears():
    """Of the shape "tiny" in float32, by hand: its sizes are read, the sum is not."""
    from lora_jax.bench.traffic import adapter_bytes
    from lora_jax.models.shapes import known_shape

    config = known_shape("tiny")
    h, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    assert adapter_bytes(config, 4, 3, ("q_proj", "v_proj")) == 4 * 3 * config.num_layers * (h + q + h + kv)
    rest = adapter_bytes(config, 4, 3, ("k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    assert adapter_bytes(config, 4, 3) == rest + adapter_bytes(config, 4, 3, ("q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--more-adapters 64 --max-loras 8", "16 adapters in all need --max-loras as large, not 8"),
        ("--more-adapters 64 64 --max-loras 32", "8 adapters of rank 64 are measured once already"),
        ("--more-adapters 16 --max-loras 32", "8 adapters of rank 16 are measured once already"),
        ("--more-adapters 64 --max-loras 16 --max-lora-rank 32", "--lora-rank 64 do not fit --max-lora-rank 32"),
    ],
)
def test_kinds_that_cannot_be_measured_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        overhead.check(parse("--batch-size", "8", *words.split(), "--device", "cpu"))


@pytest.mark.parametrize("text", ["", "0", "8,", "x", "8:", "8:q", "8:q_proj,", ":q_proj"])
def test_a_kind_that_is_none_is_named(text):
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        parse("--more-adapters", text, "--device", "cpu")
