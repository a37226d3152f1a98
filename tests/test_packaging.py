"""The wheel as a user gets it: what is inside, what importing it brings in, what its command answers."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import lora_jax

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"tokenizers", "transformers", "torch", "jax", "flax", "numpy", "safetensors"}
HTTP = {"fastapi", "starlette", "uvicorn", "httpx", "aiohttp", "requests", "urllib3", "http.client", "huggingface_hub"}
HOST_ONLY = ["config", "errors", "request", "step_keys", "scheduler", "block_pool", "lora.slots", "lora.adapter"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left in the repository and none found there is used."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "lora_jax", "kernels"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)],
        check=True,
        capture_output=True,
        text=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment of its own with the wheel alone inside; the dependencies are lent by this environment's folder.

    A folder named by a .pth file is searched for packages, but its own .pth files, such as this project's editable
    install, are not read.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    binary = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(binary), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, text=True)
    lender = Path(pytest.__file__).parents[1]
    (site / "dependencies.pth").write_text(f"{lender}\n")
    return str(binary)


def run(python: str, *arguments: str) -> str:
    """Output of a fresh process that sees neither this folder nor this environment's variables."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([python, *arguments], cwd=Path(python).parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules_after(python: str, statement: str) -> set[str]:
    return set(run(python, "-c", f"{statement}; import sys; print(*sys.modules)").split())


def test_wheel_contents(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"lora_jax", f"lora_jax-{lora_jax.__version__}.dist-info"}
    assert "lora_jax/py.typed" in names
    shipped = {str(Path("lora_jax/kernels", p.name)) for p in (ROOT / "kernels").glob("*.py")}
    shipped |= {str(p.relative_to(ROOT)) for p in (ROOT / "lora_jax").rglob("*.py")}
    assert shipped <= set(names), "a package is missing from the list in pyproject.toml"


def test_wheel_holds_the_demo_adapters(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    folders = {Path(n).parent for n in names if n.endswith("adapter_model.safetensors")}
    assert len(folders) == 3
    for folder in folders:
        assert folder.parent == Path("lora_jax/demo/adapters")
        assert f"{folder}/adapter_config.json" in names


def test_metadata_says_what_the_project_file_says(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    (path,) = [n for n in archive.namelist() if n.endswith("dist-info/METADATA")]
    metadata = email.message_from_string(archive.read(path).decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Name"] == "lora-jax"
    assert metadata["Version"] == lora_jax.__version__
    assert set(metadata.get_all("Provides-Extra") or ()) == set(project["optional-dependencies"])
    required = [r for r in metadata.get_all("Requires-Dist") or () if "extra ==" not in r]
    assert not any(word in r for r in required for word in ("torch", "fastapi", "llama"))


def test_installed_kernels_are_inside_the_package(python: str):
    where = "import lora_jax.kernels as k, lora_jax; print(lora_jax.__file__); print(k.__file__)"
    package, kernels = run(python, "-c", where).split()
    assert str(ROOT) not in package
    assert Path(kernels).parent == Path(package).parent / "kernels"
    found = "import importlib.util as u; print(u.find_spec('kernels'))"
    assert run(python, "-c", found).strip() == "None"


def test_import_brings_in_nothing_else(python: str):
    loaded = modules_after(python, "import lora_jax; lora_jax.SamplingParams(); lora_jax.__all__; dir(lora_jax)")
    assert not loaded & (HEAVY | HTTP)


@pytest.mark.parametrize("module", HOST_ONLY)
def test_host_logic_runs_without_jax(python: str, module: str):
    loaded = modules_after(python, f"import lora_jax.{module}")
    assert f"lora_jax.{module}" in loaded
    assert not loaded & {"jax", "jaxlib", "flax", "torch"}


def test_llm_needs_neither_torch_nor_a_web_framework(python: str):
    loaded = modules_after(python, "from lora_jax import LLM")
    assert "jax" in loaded
    assert not loaded & {"torch", "fastapi", "starlette", "uvicorn", "transformers", "tokenizers"}


def test_every_public_name_resolves():
    assert {name: getattr(lora_jax, name) is not None for name in lora_jax.__all__} == dict.fromkeys(
        lora_jax.__all__, True
    )
    assert set(lora_jax.__all__) <= set(dir(lora_jax))
    with pytest.raises(AttributeError, match="'lora_jax' has no attribute 'LMM'"):
        lora_jax.LMM  # noqa: B018


@pytest.mark.parametrize("command", [(), ("serve",), ("bench",), ("bench", "latency")])
def test_console_command_explains_itself(python: str, command: tuple[str, ...]):
    script = Path(python).with_name("lora-jax")
    out = run(str(script), *command, "--help")
    assert out.startswith("usage: " + " ".join(("lora-jax", *command)))


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_scripts_are_the_same_code(python: str, command: str):
    by_script = run(python, str(ROOT / "scripts" / f"{command}.py"), "--help")
    assert by_script == run(str(Path(python).with_name("lora-jax")), command, "--help")
