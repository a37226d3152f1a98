"""tokenizer.py on small tokenizers of each kind, against transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lora_jax.errors import ModelLoadError, RequestError
from lora_jax.tokenizer import Tokenizer
from tests.support.tokenizer_kinds import BOS, EOS, KINDS, WORDS, byte_level, save


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {kind: save(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def tokenizers(folders) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(str(folder)) for kind, folder in folders.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request, tokenizers) -> Tokenizer:
    return tokenizers[request.param]


def test_encode_and_decode_are_those_of_transformers(tokenizer, folders):
    reference = PreTrainedTokenizerFast.from_pretrained(tokenizer.name)
    for text in ("the cat", " hello", "", "naïve  日本 😀", f"a{EOS}b"):
        ids = tokenizer.encode(text)
        assert ids == reference(text)["input_ids"] and ids[0] == reference.bos_token_id
        for skip in (True, False):
            want = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip) == want
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.encode("the cat", add_special_tokens=False) == tokenizer.encode("the cat")[1:]


def test_settings_that_cut_or_fill_are_switched_off(tokenizers, tmp_path):
    backend = Backend.from_str(tokenizers["byte_level"].hf.backend_tokenizer.to_str())
    want = tokenizers["byte_level"].encode("the cat sat on the mat")
    backend.enable_truncation(3)
    backend.enable_padding(length=100)
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    assert Tokenizer.load(str(tmp_path)).encode("the cat sat on the mat") == want


def test_threads_may_share_a_tokenizer(tokenizer):
    texts = [f"{w} {i}" for i, w in enumerate(WORDS * 20)]
    alone = [(tokenizer.encode(t), tokenizer.decode(tokenizer.encode(t))) for t in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda t: (tokenizer.encode(t), tokenizer.decode(tokenizer.encode(t))), texts)) == alone


@pytest.mark.parametrize("content", [None, "{}", "{broken"], ids=["none", "empty", "broken"])
def test_no_tokenizer_is_a_named_error(tmp_path, content):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match="no usable tokenizer in .*tokenizer.json"):
        Tokenizer.load(str(tmp_path))


def test_unpaired_surrogate_is_the_callers_error(tokenizer):
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_loads_quietly_without_torch(folders):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from lora_jax.tokenizer import Tokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        f"print(Tokenizer.load({str(folders['byte_level'])!r}).encode('the cat'))"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert run.stdout.startswith("[0, ")


def test_token_texts_join_to_the_text(tokenizer):
    ids = tokenizer.encode("the hello, cat", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).lstrip(" ") == "the hello, cat"
    assert [tokenizer.token_text(i) for i in ids].count(" hello") + sum(
        t == " " for t in map(tokenizer.token_text, ids)
    )
    assert tokenizer.token_text(tokenizer.eos_token_id) == EOS


def test_token_text_of_part_of_a_character(tokenizers):
    t = tokenizers["fallback"]
    assert [t.token_text(i) for i in t.encode("é", add_special_tokens=False)] == [" ", "\ufffd", "\ufffd"]


# ---- chat


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "hello"}]
    bos = tokenizer.hf.bos_token_id

    def text(**options) -> str:
        ids = tokenizer.apply_chat_template(messages, **options)
        assert ids.count(bos) == 1 and ids[0] == bos
        return tokenizer.decode(ids, False).replace(" ", "")

    def render(tail: str) -> str:
        source = f"{BOS}[user]thecat{EOS}[assistant]hello{tail}"
        ids = tokenizer.encode(source, add_special_tokens=False)
        return tokenizer.decode(ids, False).replace(" ", "")

    assert text() == render(f"{EOS}[assistant]")
    assert text(add_generation_prompt=False) == render(EOS)
    assert text(add_generation_prompt=False, continue_final_message=True) == render("")
    assert text(chat_template_kwargs={"loud": True}) == render(f"{EOS}![assistant]")


def test_text_parts_are_joined(tokenizers):
    t = tokenizers["byte_level"]
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]
    joined = t.apply_chat_template([{"role": "user", "content": "the\ncat"}])
    assert t.apply_chat_template([{"role": "user", "content": parts}]) == joined


GOOD = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "param", "match"),
    [
        ([], "messages", "at least one message"),
        ("hello", "messages", "must be a list"),
        (GOOD, "messages", "must be a list"),
        ([GOOD, "x"], "messages[1]", "must be an object"),
        ([GOOD, {"content": "a"}], "messages[1].role", "non-empty string"),
        ([{"role": 3, "content": "a"}], "messages[0].role", "got 3"),
        ([GOOD, GOOD, {"role": "user"}], "messages[2].content", "got None"),
        ([{"role": "user", "content": 5}], "messages[0].content", "got 5"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1]",
            "'image_url' can't be served",
        ),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]", "can't be served"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "must be a string"),
        ([GOOD, {"role": "tool", "content": "a"}], "messages", "no tools here"),
    ],
)
def test_malformed_messages(tokenizers, messages, param, match):
    with pytest.raises(RequestError, match=match) as caught:
        tokenizers["byte_level"].apply_chat_template(messages)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_refused_chat_options(tokenizers, folders):
    t = tokenizers["byte_level"]
    with pytest.raises(RequestError, match="exclude each other"):
        t.apply_chat_template([GOOD], continue_final_message=True)
    for name in ("chat_template", "tokenize", "messages", "tools"):
        with pytest.raises(RequestError, match=name):
            t.apply_chat_template([GOOD], chat_template_kwargs={name: "x"})
    bare = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level()), "bare")
    with pytest.raises(RequestError, match="bare has no chat template"):
        bare.apply_chat_template([GOOD])
