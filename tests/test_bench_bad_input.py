"""Bad input of the benchmarks is one line that names it: no traceback, no endless work."""

from __future__ import annotations

import pytest

from lora_jax.bench import serve_client, workload
from lora_jax.cli import main
from lora_jax.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt_len": 3, "output_len": 1, "adapter": 1000000000}', "adapter must be an integer in"),
        ('{"prompt_len": 1000000000000, "output_len": 1}', "prompt_len must be an integer in"),
        ('{"prompt_len": 3, "output_len": 1e3}', "output_len must be an integer in"),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_a_line_of_a_workload(line, words, tmp_path):
    path = tmp_path / "list.jsonl"
    path.write_text('{"prompt_len": 3, "output_len": 1}\n' + line)
    with pytest.raises(ConfigError, match=r"line 2 of the workload .*" + words):
        workload.read(str(path), vocab=100, seed=0)
    assert len(workload.read(str(path), vocab=100, seed=0, limit=1)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("throughput tiny --load-format dummy --input-len 99999999999999999999", "--input-len: must be <= 100000000"),
        ("throughput tiny --load-format dummy --seed -1", "seed"),
        ("serve --port 99999", "--port: must be <= 65535"),
        ("serve --base-url http://[::1", "--base-url http://[::1"),
        ("serve --base-url http://host:99999", "--base-url http://host:99999"),
    ],
)
def test_options(arguments, words, capsys):
    assert main(["bench", *arguments.split()]) != 0
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": 3, "completion_tokens": "7"}, {"prompt_tokens": 3, "completion_tokens": -7}]
)
def test_a_server_that_counts_nonsense(usage):
    with pytest.raises(ValueError, match="usage"):
        serve_client._take({"usage": usage}, serve_client.Reply("m", 0.0), 1.0)
