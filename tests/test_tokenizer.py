"""tokenizer.py and detokenizer.py on small tokenizers of each kind: byte-level, Metaspace, Metaspace with byte fallback."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lora_jax.detokenizer import BROKEN, IncrementalDetokenizer
from lora_jax.errors import ModelLoadError, RequestError
from lora_jax.request import SamplingParams
from lora_jax.tokenizer import Tokenizer

WORDS = [
    "Hello world, how are you?",
    "the cat sat on the mat",
    "naïve café",
    "日本語のテキスト",
    "привет мир",
    "😀😃",
] * 3
BOS, EOS = "<s>", "</s>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}{% if loud %}!{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[BOS, EOS], initial_alphabet=alphabet)  # type: ignore[call-arg]
    backend.train_from_iterator(WORDS, trainer)
    return backend


def _metaspace() -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    backend.decoder = decoders.Metaspace()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", BOS, EOS])  # type: ignore[call-arg]
    backend.train_from_iterator(WORDS, trainer)
    return backend


def _fallback() -> Backend:
    """As Llama 2's: whatever is not in the vocabulary is spelt in tokens <0x00> to <0xFF>."""
    vocab = {"<unk>": 0, BOS: 1, EOS: 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.,!", "he", "hel", "▁he", "▁hel", "▁the", "lo", "▁▁"]:
        vocab.setdefault(piece, len(vocab))
    if "th" not in vocab:
        vocab |= {"th": len(vocab), "▁th": len(vocab) + 1}
    merges = [("h", "e"), ("he", "l"), ("▁", "he"), ("▁he", "l"), ("t", "h"), ("▁", "th"), ("▁th", "e"), ("l", "o")]
    backend = Backend(models.BPE(vocab, [*merges, ("▁", "▁")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    return backend


KINDS = {"byte_level": _byte_level, "metaspace": _metaspace, "fallback": _fallback}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    out = {}
    for kind, make in KINDS.items():
        backend = make()
        bos = backend.token_to_id(BOS)
        backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
        backend.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, bos)])  # type: ignore
        hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
        hf.chat_template = TEMPLATE
        out[kind] = tmp_path_factory.mktemp(kind)
        hf.save_pretrained(out[kind])
    return out


@pytest.fixture(scope="module")
def tokenizers(folders) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(str(folder)) for kind, folder in folders.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request, tokenizers) -> Tokenizer:
    return tokenizers[request.param]


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], **params: Any) -> tuple[list[str], str | None]:
    """The deltas of ids given one by one, flushed unless stopped, and the stop string."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(**params))
    deltas = []
    for id in ids:
        delta, stop = detokenizer.append([id])
        deltas.append(delta)
        if stop is not None:
            assert detokenizer.append([id]) == ("", None) and detokenizer.flush() == ""
            return deltas, stop
    return [*deltas, detokenizer.flush()], None


# ---- Tokenizer


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
    assert [t.token_text(i) for i in t.encode("é", add_special_tokens=False)] == [" ", BROKEN, BROKEN]


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
    bare = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=_byte_level()), "bare")
    with pytest.raises(RequestError, match="bare has no chat template"):
        bare.apply_chat_template([GOOD])


# ---- streaming

RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PIECES = st.sampled_from(
    ["the cat", " ", "  ", "\n", "hello", ".", "日本", "語", "é", "😀", "👩\u200d👧", BROKEN, EOS, "q", "ﬀ", "\x00"]
)
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join)


@RELAXED
@given(TEXTS, st.sampled_from(["", "hello", "日本", "the cat "]), st.booleans())
def test_deltas_make_the_text(tokenizers, text, prompt, skip):
    """What the output adds to prompt and output together, which for an empty prompt is decode(output)."""
    for kind, t in tokenizers.items():
        start = t.encode(prompt)
        ids = t.encode(prompt + text)
        if ids[: len(start)] != start:  # the text changed how the prompt is split
            ids = start + t.encode(text, add_special_tokens=False)
        deltas, _ = stream(t, start, ids[len(start) :], skip_special_tokens=skip)
        before, after = t.decode(start, skip), t.decode(ids, skip)
        assert "".join(deltas) == after[len(before) :], kind
        if not text.count(BROKEN) and kind != "metaspace":
            assert BROKEN not in "".join(deltas)


@RELAXED
@given(st.lists(st.integers(0, 399), max_size=80), st.booleans())
def test_any_ids_make_the_text_of_byte_level_tokens(tokenizers, ids, skip):
    t = tokenizers["byte_level"]
    assert "".join(stream(t, [], ids, skip_special_tokens=skip)[0]) == t.decode(ids, skip)


def byte_ids(t: Tokenizer, data: bytes) -> list[int]:
    """The ids that spell bytes one by one."""
    if t.hf.backend_tokenizer.token_to_id("<0x00>") is not None:
        return [t.hf.backend_tokenizer.token_to_id(f"<0x{b:02X}>") for b in data]
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's alphabet writes as themselves
    others = {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in shown)}
    return [t.hf.backend_tokenizer.token_to_id(others.get(b, chr(b))) for b in data]


BYTES = st.lists(st.sampled_from([0x80, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x41]), max_size=60).map(bytes)


@RELAXED
@given(BYTES)
@example(b"\xe4" * 60)
@example(b"\x80" * 60 + "日".encode())
@example(b"\xf0\x9f" * 25 + b"\x98\x80")
@example("日本語".encode() * 20 + b"\xe6")
def test_broken_bytes_one_by_one(tokenizers, data):
    t = tokenizers["byte_level"]
    deltas, _ = stream(t, [], byte_ids(t, data))
    assert "".join(deltas) == data.decode("utf-8", "replace") == t.decode(byte_ids(t, data))


@pytest.mark.parametrize("n", range(12, 19))
@pytest.mark.parametrize("end", [b"\xf0\x9f\x98\x80", b"A\xe4\xb8\xad"])
def test_long_broken_runs_are_cut_between_characters_only(n, end):
    backend = _byte_level()
    vocab = {c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    a, e4 = "A", "ä"  # the alphabet's letter of 0xE4
    backend.model = models.BPE(vocab | {a + e4: 256}, [(a, e4)])  # type: ignore[assignment]
    t = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "bytes")
    ids = byte_ids(t, b"\xe4" * n + end)
    if end.startswith(b"A"):  # one token that ends a broken run and begins a character
        ids[n : n + 2] = [256]
    assert "".join(stream(t, [], ids)[0]) == BROKEN * n + end.decode()


@RELAXED
@given(BYTES)
def test_fallback_bytes_keep_complete_characters(tokenizers, data):
    """A decode of the whole shows all bytes of a run as broken if one is; the stream shows what can be read."""
    t = tokenizers["fallback"]
    prompt, end = t.encode("the"), t.encode("the", add_special_tokens=False)
    text = "".join(stream(t, prompt, byte_ids(t, data) + end)[0])
    assert text == data.decode("utf-8", "replace") + " the"
    if BROKEN not in text:
        assert text == t.decode(prompt + byte_ids(t, data) + end)[len("the") :]


def test_spaces_and_characters_go_on_from_the_prompt(tokenizers):
    for kind in ("metaspace", "fallback"):
        t = tokenizers[kind]
        ids = t.encode("the hello", add_special_tokens=False)
        assert "".join(stream(t, t.encode("hello"), ids)[0]) == " the hello"
        assert "".join(stream(t, [], ids)[0]) == "".join(stream(t, [t.hf.bos_token_id], ids)[0]) == "the hello"
        silent = [t.eos_token_id] * 60
        assert "".join(stream(t, t.encode("hello") + silent[:9], [*silent, *ids])[0]) == " the hello"
    for kind in ("byte_level", "fallback"):
        face = byte_ids(tokenizers[kind], "ab😀!".encode())
        for n in (3, 4, 5):
            assert "".join(stream(tokenizers[kind], face[:n], face[n:])[0]) == "😀!"


def test_incomplete_characters_wait(tokenizers):
    for kind in ("byte_level", "fallback"):
        t = tokenizers[kind]
        deltas, _ = stream(t, [], byte_ids(t, "a日😀".encode() + b"\xe6"))
        assert deltas == ["a", "", "", "日", "", "", "", "😀", "", BROKEN]


def test_ids_outside_the_vocabulary_say_nothing(tokenizer):
    a, b = tokenizer.encode("the hello", add_special_tokens=False)[:1], tokenizer.encode(" cat")[1:]
    assert "".join(stream(tokenizer, [], [*a, 10**6, *b])[0]) == tokenizer.decode(a + b)


@pytest.mark.parametrize("text", [b"the cat sat " * 60, b"\xe4" * 700, b"\x80" * 700, "日本".encode() * 120])
def test_work_per_token_does_not_grow(tokenizers, text, monkeypatch):
    t = tokenizers["byte_level"]
    work, decode = [], t.decode

    def counting(ids, skip_special_tokens=True):
        work[-1] += len(ids)
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(t, "decode", counting)
    work.append(0)
    detokenizer = IncrementalDetokenizer(t, [], SamplingParams())
    for id in byte_ids(t, text):
        work.append(0)
        detokenizer.append([id])
    assert sum(work) < 60 * len(text) and max(work) < 400


# ---- stop strings


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first moment at which some stop string is complete; the longest if several are."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@RELAXED
@given(st.text("ab日", max_size=14), st.lists(st.text("ab日", min_size=1, max_size=4), max_size=3), st.booleans())
@example("aabab", ["abab", "ba"], False)
def test_stop_strings_cut_the_text(tokenizers, text, stops, include):
    t = tokenizers["byte_level"]
    for ids in (byte_ids(t, text.encode()), t.encode(text, add_special_tokens=False)):
        deltas, stop = stream(t, [], ids, stop=stops, include_stop_str_in_output=include)
        assert ("".join(deltas), stop) == cut(text, stops, include)
        given_so_far = ""
        for n, delta in enumerate(deltas[: len(ids)], 1):  # nothing waits without need
            given_so_far += delta
            if n < len(deltas) - 1 or stop is None:
                seen = t.decode(ids[:n]).rstrip(BROKEN)
                rest = seen[len(given_so_far) :]
                assert rest == max((r for s in stops for r in _ends(seen, s)), key=len, default="")


def _ends(text: str, stop: str) -> list[str]:
    return [stop[:n] for n in range(len(stop)) if text.endswith(stop[:n])]


def test_stop_strings_do_not_count_before_min_tokens(tokenizers):
    t = tokenizers["byte_level"]
    ids = byte_ids(t, b"xabyabz")
    detokenizer = IncrementalDetokenizer(t, [], SamplingParams(stop=["ab", "yab"], min_tokens=4))
    out = [detokenizer.append([id], check_stop=n >= 3) for n, id in enumerate(ids, 1)]
    assert out == [("x", None), ("", None), ("", "ab"), *[("", None)] * 4]  # complete exactly when checking starts
    detokenizer = IncrementalDetokenizer(t, [], SamplingParams(stop=["ab", "yab"], min_tokens=4))
    out = [detokenizer.append([id], check_stop=n >= 4) for n, id in enumerate(ids, 1)]
    assert out == [("x", None), ("", None), ("ab", None), ("", None), ("", None), ("", "yab"), ("", None)]
    detokenizer = IncrementalDetokenizer(t, [], SamplingParams(stop=["ab", "abz"]))
    out = [detokenizer.append([id], check_stop=n >= 4) for n, id in enumerate(ids, 1)]
    assert [d for d, _ in out] == ["x", "", "", "aby", "", "", ""] and out[5][1] == "ab"  # the first one is never found
    detokenizer = IncrementalDetokenizer(t, [], SamplingParams(stop="bya"))
    out = [detokenizer.append([id], check_stop=n >= 4) for n, id in enumerate(ids, 1)]
    assert [d for d, _ in out] == ["x", "a", "", "", "", "", ""] and out[4][1] == "bya"  # begins before, ends after


def test_several_tokens_at_once_and_text_held_at_the_end(tokenizers):
    t = tokenizers["byte_level"]
    detokenizer = IncrementalDetokenizer(t, [], SamplingParams(stop=["STOP"]))
    assert detokenizer.append(byte_ids(t, b"one ST")) == ("one ", None)
    assert detokenizer.append(byte_ids(t, b"O")) == ("", None)
    assert detokenizer.flush() == "STO" and detokenizer.flush() == ""
    detokenizer = IncrementalDetokenizer(t, [], SamplingParams(stop=["STOP"], include_stop_str_in_output=True))
    assert detokenizer.append(byte_ids(t, b"one STOP two")) == ("one STOP", "STOP")
    ids = t.encode("the cat", add_special_tokens=False)
    assert t.decode(ids[:1]) == "the"  # the token goes on behind the stop string
    assert stream(t, [], ids, stop="h", include_stop_str_in_output=True) == (["th"], "h")
    assert stream(t, [], ids, stop="h") == (["t"], "h")
