"""The command line: options generated from the dataclasses, errors in one line."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lora_jax import cli, cli_args
from lora_jax.config import EngineArgs
from lora_jax.errors import AdapterError, CapacityError, ConfigError, ModelLoadError
from lora_jax.server.options import ServerArgs


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineArgs, ServerArgs]]:
    """What would have been served."""
    from lora_jax.server import launch

    calls: list[tuple[EngineArgs, ServerArgs]] = []
    monkeypatch.setattr(launch, "serve", lambda engine, server: calls.append((engine, server)) or 0)
    return calls


def error_of(capsys: pytest.CaptureFixture[str], code: int, *argv: str) -> str:
    assert cli.main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("lora-jax: error: ") and captured.err.count("\n") == 1
    return captured.err


def test_defaults_are_those_of_the_dataclasses(served: list[Any]) -> None:
    assert cli.main(["serve", "m"]) == 0
    assert served == [(EngineArgs(model="m"), ServerArgs())]


def test_every_kind_of_option(served: list[Any]) -> None:
    argv = "serve m --max-loras 3 --max_cpu_loras=9 --max-lora-rank 32 --enable-lora --no-enable-command-buffers"
    argv += " --gpu-memory-utilization 0.5 --dtype bfloat16 --lora-target-modules q_proj v_proj --port 81 --host ::1"
    argv += " --served-model-name x y --shutdown_grace 2.5 --disable-tqdm --seed 7"
    assert cli.main(argv.split()) == 0
    engine = dict(max_loras=3, max_cpu_loras=9, max_lora_rank=32, enable_lora=True, enable_command_buffers=False)
    engine |= dict(gpu_memory_utilization=0.5, dtype="bfloat16", lora_target_modules=("q_proj", "v_proj"), seed=7)
    server = dict(port=81, host="::1", served_model_name=("x", "y"), shutdown_grace=2.5)
    assert served == [(EngineArgs(model="m", disable_tqdm=True, **engine), ServerArgs(**server))]  # type: ignore[arg-type]


def test_every_field_is_an_option_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for cls in (EngineArgs, ServerArgs):
        for f in dataclasses.fields(cls):
            assert f"--{f.name.replace('_', '-')}" in text
    assert not set(cli_args.VLLM_ONLY) & {
        f.name.replace("_", "-") for cls in (EngineArgs, ServerArgs) for f in dataclasses.fields(cls)
    }


def test_the_model_may_be_an_option(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["m"], ["--model", "m"], ["--model=m"], ["m", "--model", "m"]):
        assert cli.main(["serve", *argv]) == 0
    assert {engine.model for engine, _ in served} == {"m"} and len(served) == 4
    assert "two models" in error_of(capsys, 2, "serve", "m", "--model", "n")
    assert "no model" in error_of(capsys, 2, "serve")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("serve m --max-lora 3", "unknown option --max-lora; did you mean --max-loras?"),
        ("serve m --portt 3", "did you mean --port?"),
        ("serve m --frobnicate", "unknown option --frobnicate"),
        ("serve m --quantization awq", "--quantization is an option of vLLM that lora_jax does not have"),
        ("serve m --block_size 16", "use --page-size"),
        ("serve m --max-loras many", "--max-loras: invalid int value: 'many'"),
        ("serve m --max-loras", "--max-loras: expected one argument"),
        ("serve m --max-lora-rank big", "invalid int or auto value"),
        ("serve m --max-loras 0", "max_loras must be >= 1"),
        ("serve m --dtype int8", "--dtype: invalid choice: 'int8'"),
        ("serve m --port 70000", "port must be in"),
        ("serve m --lora-modules x", "'x' is not name=path"),
        (
            "serve --lora-modules a=/x m",
            "no model is named: give a Hugging Face directory or a hub id as the first argument",
        ),
        ("serve m --lora-modules a=/x a=/y", "the name 'a' is given twice"),
        ("serve m --lora-modules m=/x", "'m' is already the name of the base model"),
        ("serve m --served-model-name a --lora-modules a=/x", "'a' is already the name"),
        ("serve m --enable-runtime-lora-updating", "needs lora_root"),
        ("serve m n", "unexpected argument 'n'"),
        ("sevre m", "invalid choice: 'sevre'"),
        ("", "arguments are required"),
        ("serve m --tensor-parallel-size 2", "tensor_parallel_size=2"),
    ],
)
def test_wrong_options_give_one_line(
    served: list[Any], capsys: pytest.CaptureFixture[str], argv: str, words: str
) -> None:
    assert words in error_of(capsys, 2, *argv.split())
    assert served == []


def test_lora_modules(served: list[Any]) -> None:
    json_form = '{"name": "b", "path": "/p=q", "base_model_name": "m"}'
    assert cli.main(["serve", "m", "--lora-modules", "a=/x=y", json_form, "--lora-modules", "c=d"]) == 0
    engine = served[0][0]
    assert engine.lora_modules == ("a=/x=y", "b=/p=q", "c=d") and engine.enable_lora


@pytest.mark.parametrize(
    "text",
    [
        "",
        "=x",
        "a=",
        "{",
        "{}",
        '{"name": 1, "path": "x"}',
        '{"name": "a", "path": "x", "y": 1}',
        '{"name": "a=b", "path": "x"}',
    ],
)
def test_wrong_lora_modules(text: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        cli_args.lora_module(text)


def test_loading_at_run_time_needs_adapters_on(served: list[Any], tmp_path: Path) -> None:
    assert cli.main(["serve", "m", "--enable-runtime-lora-updating", "--lora-root", str(tmp_path)]) == 0
    assert served[0][0].enable_lora


def test_the_demo_model(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assets = types.SimpleNamespace(model_path="/cache/demo", lora_modules={"pirate": "/shipped/pirate"})
    module = types.ModuleType("lora_jax.demo.assets")
    monkeypatch.setattr(module, "prepare", lambda: assets, raising=False)
    monkeypatch.setitem(sys.modules, "lora_jax.demo.assets", module)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256}
    monkeypatch.setattr(module, "SIZES", sizes, raising=False)
    assert cli.main(["serve", "--model", "demo", "--lora-modules", "mine=/x"]) == 0
    engine, server = served[0]
    assert sizes == {name: getattr(engine, name) for name in sizes}
    assert cli.main(["serve", "demo", "--max-model-len", "512"]) == 0
    assert (served[1][0].max_model_len, served[1][0].max_num_seqs) == (512, 8)
    assert (engine.model, engine.lora_modules) == ("/cache/demo", ("pirate=/shipped/pirate", "mine=/x"))
    assert server.served_model_name == ("demo",)


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError, 2), (ModelLoadError, 1), (CapacityError, 1), (AdapterError, 1)]
)
def test_errors_at_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception], code: int
) -> None:
    from lora_jax.server import launch

    def fail(args: EngineArgs) -> Any:
        raise error("this is what went wrong")

    monkeypatch.setattr(launch, "build_engine", fail)
    assert "this is what went wrong" in error_of(capsys, code, "serve", "m", "--port", "0")


def test_missing_server_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "'.[serve]'" in error_of(capsys, 1, "serve", "m")


def test_bench_is_imported_when_asked_for(monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    runs: list[Any] = []
    module = types.ModuleType("lora_jax.bench.cli")
    monkeypatch.setattr(
        module, "add_subcommands", lambda parser: parser.add_argument("--size", type=int), raising=False
    )
    monkeypatch.setattr(module, "run", lambda options: runs.append(options.size) or 3, raising=False)
    monkeypatch.setitem(sys.modules, "lora_jax.bench.cli", module)
    assert cli.main(["serve", "bench"]) == 0 and served[0][0].model == "bench" and runs == []
    assert cli.main(["bench", "--size", "4"]) == 3 and runs == [4]


def test_a_model_behind_a_list_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, 2, "bench", "overhead", "--batch-size", "1", "2", "tiny")
    assert "got 'tiny' (if tiny is the model: it goes before the options, or as --model tiny)" in error
    assert "model" not in error_of(capsys, 2, "bench", "overhead", "tiny", "--batch-size", "1", "0")
    assert "model" not in error_of(capsys, 2, "bench", "latency", "tiny", "--batch-size", "x")


def test_engine_arguments_for_other_commands() -> None:
    parser = cli_args.OptionParser()
    cli_args.add_engine_arguments(parser)
    args = cli_args.engine_args_from(parser.parse_all(["m", "--lora-modules", "a=b"]), max_loras=2)
    assert args == EngineArgs(model="m", lora_modules=("a=b",), max_loras=2)


def test_a_wrong_command_line_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys; from lora_jax import cli; cli.main(['serve', '--nope'])\n"
    code += "print([m for m in ('jax', 'fastapi', 'transformers', 'uvicorn', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_the_script_is_the_command() -> None:
    script = Path(__file__).parents[1] / "scripts" / "serve.py"
    out = subprocess.run([sys.executable, str(script), "--nope"], capture_output=True, text=True, timeout=60)
    assert out.returncode == 2 and "unknown option --nope" in out.stderr
