"""Models, adapters at run time, tokens, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_jax.errors import ConfigError
from lora_jax.server.options import ServerArgs
from tests.server.conftest import Running, running, wait_for


def test_models(server: Running) -> None:
    cards = {m.id: m for m in server.openai.models.list()}
    assert list(cards) == ["base", "alias", "up1", "up2", "org/up3"]
    assert (cards["base"].root, cards["base"].parent, cards["base"].max_model_len) == ("/models/fake", None, 4096)  # type: ignore[attr-defined]
    assert (cards["up1"].root, cards["up1"].parent) == ("/adapters/up1", "base")  # type: ignore[attr-defined]
    assert server.openai.models.retrieve("org/up3").id == "org/up3"


def test_health_version_stats_and_schema(server: Running) -> None:
    from lora_jax import __version__

    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/version").json() == {"version": __version__}
    stats = server.http.get("/stats").json()
    assert stats["free_pages"] == 99 and stats["step_table"] == [{"key": "decode[1]", "hits": 0}]
    schema = server.http.get("/openapi.json").json()
    reference = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "$ref"
    ]
    assert "prompt" in schema["components"]["schemas"][reference.rpartition("/")[2]]["properties"]


def test_tokenize_and_back(server: Running) -> None:
    out = server.post("/tokenize", model="base", prompt="aé", return_token_strs=True).json()
    assert out == {"count": 2, "max_model_len": 4096, "tokens": [97, 233], "token_strs": ["a", "é"]}
    assert server.post("/detokenize", tokens=out["tokens"]).json() == {"prompt": "aé"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()
    assert chat["tokens"] == [ord(c) for c in "<user>x<assistant>"]
    assert server.post("/tokenize", model="nope", prompt="a").status_code == 404
    assert server.post("/tokenize").status_code == 400
    assert server.post("/detokenize", tokens=[-1]).status_code == 400


def test_metrics(start: Any) -> None:
    with start() as server:
        _check_metrics(server)


def _check_metrics(server: Running) -> None:
    server.post("/v1/completions", model="up1", prompt="abc", max_tokens=5)
    server.post("/v1/completions", model="base", prompt=["a", "b"], max_tokens=1)
    server.post("/v1/completions", model="base", prompt="!fails")
    text = server.http.get("/metrics").text
    for line in (
        'lora_jax_requests_total{model="up1",outcome="length"} 1.0',
        'lora_jax_requests_total{model="base",outcome="length"} 2.0',
        'lora_jax_requests_total{model="base",outcome="error"} 1.0',
        'lora_jax_prompt_tokens_total{model="up1"} 3.0',
        'lora_jax_generation_tokens_total{model="up1"} 5.0',
        'lora_jax_open_requests{model="up1"} 0.0',
        'lora_jax_request_seconds_count{model="up1"} 1.0',
        "lora_jax_engine_compilations_after_warmup 0.0",
        "lora_jax_engine_free_pages 99.0",
    ):
        assert line in text.splitlines()


def test_metrics_count_an_abort(server: Running) -> None:
    server.engine.delay = 0.002
    stream = server.openai.completions.create(model="up2", prompt="a", max_tokens=4000, stream=True)
    next(iter(stream))
    stream.close()
    line = 'lora_jax_requests_total{model="up2",outcome="abort"} 1.0'
    wait_for(lambda: line in server.http.get("/metrics").text)


def test_adapters_stay_as_they_are_by_default(server: Running) -> None:
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}),
        ("/v1/unload_lora_adapter", {"lora_name": "up1"}),
    ):
        response = server.post(path, **body)
        assert response.status_code == 404 and "--enable-runtime-lora-updating" in response.json()["error"]["message"]
    assert "up1" in server.engine.loras


@pytest.fixture
def updatable(tmp_path: Path) -> Any:
    for name in ("good", "broken", "other"):
        (tmp_path / "root" / name).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "other" / "adapter_model.safetensors").symlink_to("/etc/passwd")
    with running(enable_runtime_lora_updating=True, lora_root=str(tmp_path / "root")) as server:
        yield server


def test_load_use_unload(updatable: Running, tmp_path: Path) -> None:
    server = updatable
    response = server.post("/v1/load_lora_adapter", lora_name="new", lora_path="good")
    assert response.status_code == 200 and "new" in response.text
    assert server.engine.loras["new"].path == str(tmp_path / "root" / "good")
    out = server.openai.completions.create(model="new", prompt="a", max_tokens=2)
    assert out.choices[0].text == "hh"
    again = {"lora_name": "new", "lora_path": str(tmp_path / "root" / "good")}
    assert server.post("/v1/load_lora_adapter", **again).status_code == 400
    assert server.post("/v1/load_lora_adapter", **again, load_inplace=True).status_code == 200
    assert 'model="new"' in server.http.get("/metrics").text
    assert server.post("/v1/unload_lora_adapter", lora_name="new", lora_int_id=3).status_code == 200
    assert 'model="new"' not in server.http.get("/metrics").text
    assert server.post("/v1/completions", model="new", prompt="a").status_code == 404
    assert server.post("/v1/unload_lora_adapter", lora_name="new").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["../outside", "/etc", "good/../../outside", "link", "other", "", "a\0b", "good\n/../..", "x" * 5000, "broken"],
)
def test_what_must_not_be_loaded(updatable: Running, path: str) -> None:
    before = dict(updatable.engine.loras)
    response = updatable.post("/v1/load_lora_adapter", lora_name="new", lora_path=path)
    assert response.status_code == 400 and response.json()["error"]["message"]
    assert updatable.engine.loras == before


@pytest.mark.parametrize("name", ["", "base", "alias", "a\nb", "x" * 300, 5, None])
def test_names_that_an_adapter_cannot_have(updatable: Running, name: Any) -> None:
    response = updatable.post("/v1/load_lora_adapter", lora_name=name, lora_path="good")
    assert response.status_code == 400 and response.json()["error"]["param"] == "lora_name"


def test_server_options_are_checked(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"port": 70000},
        {"api_key": " "},
        {"max_open_requests": 0},
        {"shutdown_grace": -1},
        {"served_model_name": ("",)},
        {"enable_runtime_lora_updating": True},
        {"lora_root": str(tmp_path)},
        {"lora_root": str(tmp_path / "none"), "enable_runtime_lora_updating": True},
    ]
    for options in wrong:
        with pytest.raises(ConfigError, match=next(iter(options))):
            ServerArgs(**options)
