"""Small tokenizers of each kind, made on the spot: byte-level, Metaspace, Metaspace with byte fallback."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

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


def byte_level() -> Backend:
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


KINDS = {"byte_level": byte_level, "metaspace": _metaspace, "fallback": _fallback}


def save(kind: str, folder: Path) -> Path:
    """One of KINDS with BOS, EOS and a chat template, as a checkpoint's folder has it."""
    backend = KINDS[kind]()
    bos = backend.token_to_id(BOS)
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    backend.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, bos)])  # type: ignore
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    hf.chat_template = TEMPLATE
    hf.save_pretrained(folder)
    return folder


def byte_ids(backend: Backend, data: bytes) -> list[int]:
    """The ids that spell bytes one by one."""
    if backend.token_to_id("<0x00>") is not None:
        names = [f"<0x{b:02X}>" for b in range(256)]
    else:
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's alphabet writes these as themselves
        others = {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in shown)}
        names = [others.get(b, chr(b)) for b in range(256)]
    vocab = backend.get_vocab()
    return [vocab[names[b]] for b in data]
