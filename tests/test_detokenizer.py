"""detokenizer.py on small tokenizers of each kind: what streams makes the whole text, cut at stop strings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lora_jax.detokenizer import BROKEN, IncrementalDetokenizer
from lora_jax.request import SamplingParams
from lora_jax.tokenizer import Tokenizer
from tests.support.tokenizer_kinds import EOS, KINDS, byte_level, save
from tests.support.tokenizer_kinds import byte_ids as spell


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(str(save(kind, tmp_path_factory.mktemp(kind)))) for kind in KINDS}


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
    return spell(t.hf.backend_tokenizer, data)


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
    backend = byte_level()
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
