"""Trains the bundled demo model from scratch and writes its directory and its example set.

    python tools/train_demo.py

Makes the tokenizer, the model and `examples.jsonl` under `src/freight/demo/` from generated data
alone (`demo_tasks.py`), with a fixed seed; nothing is downloaded.  `--out DIR` writes elsewhere,
`--resume` goes on from the last checkpoint, `--only-evaluate` just measures what is there.
Needs transformers and a C++ compiler (for torch.compile); half an hour on two free CPU cores.
The bundled weights took 3800 steps in resumed runs: 2000 on a harder form of the match task (the
first 1500 without the echo below) and MIX 1, 1.2, 1.4, 1, 1.6, then 1800 on the tasks as they
are, the last 1300 with stream seed 2.

It does not know how Freight itself loads or runs the model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import demo_tasks
import torch
from demo_tasks import ANSWER_LIMIT, TASKS, Example
from tokenizers import Encoding, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Coder
from transformers.utils import logging

END = "<|end|>"
SEED = 1
VOCABULARY, POSITIONS = 1024, 512
SHAPE = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
# The second record of a pair is learned too, lightly: that teaches lining the two records up.
ECHO, ECHO_WEIGHT = "\nB:", 0.125
LENGTHS = (24, 32, 48, 64, 80)  # padded lengths; a fixed few, because each is compiled separately
STEP_TOKENS = 6144
MIX = (0.6, 1.2, 1.2, 1.2, 2.6)  # shares of the tasks in training, in the order of TASKS
# The first letter of a word is a piece of its own, so that "smith" and "Smith" share "mith";
# digits are single too.  Every character falls in one alternative: any text round-trips.
PIECES = r" \p{L}|(?<!\p{L})\p{L}|(?<=\p{L})\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s"
SCORED = {"output_scores": True, "return_dict_in_generate": True}
Batch = tuple[torch.Tensor, torch.Tensor]
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_tokenizer(examples: Sequence[Example]) -> Coder:
    """Byte-level BPE over the tasks' own text; it adds no token of its own to a prompt."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((f"{e.prompt} {e.expected}" for e in examples), trainer)
    return Coder(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def make_model(tokenizer: Coder) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **SHAPE,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        attn_implementation="eager",  # for short rows its backward pass is the faster on a CPU
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


class Rows:
    """Tokenised examples of one padded length: the tokens, and each one's weight in the loss."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.tokens: list[list[int]] = []
        self.weights: list[list[float]] = []

    def add(self, prompt: Encoding, answer: list[int], echo: int) -> None:
        tail = self.length + 1 - len(prompt.ids) - len(answer)
        self.tokens.append(prompt.ids + answer + answer[-1:] * tail)
        light = [ECHO_WEIGHT if start > echo else 0.0 for start, _ in prompt.offsets]
        self.weights.append(light + [1.0] * len(answer) + [0.0] * tail)

    def batches(self, size: int) -> list[Batch]:
        tokens = torch.tensor(self.tokens, dtype=torch.int16).split(size)
        weights = torch.tensor(self.weights, dtype=torch.float16).split(size)
        return list(zip(tokens, weights, strict=True))


def tokenised(examples: Sequence[Example], tokenizer: Coder) -> list[Rows]:
    """The examples in their buckets; one that is longer than the longest bucket is left out."""
    rows, end = [Rows(length) for length in LENGTHS], tokenizer.eos_token_id
    for example in examples:
        prompt = tokenizer.backend_tokenizer.encode(example.prompt)
        answer = [*tokenizer.backend_tokenizer.encode(f" {example.expected}").ids, end]
        bucket = next((r for r in rows if r.length + 1 >= len(prompt.ids) + len(answer)), None)
        if bucket:
            echo = example.prompt.find(ECHO) if ECHO in example.prompt else len(example.prompt)
            bucket.add(prompt, answer, echo)
    return [bucket for bucket in rows if bucket.tokens]


def endless(rows: Sequence[Rows], seed: int) -> Iterator[Batch]:
    """Full batches in a fixed shuffle, over and over."""
    rng = random.Random(seed)
    batches: list[Batch] = []
    for bucket in rows:
        size = STEP_TOKENS // bucket.length
        batches += [batch for batch in bucket.batches(size) if len(batch[0]) == size]
    while True:
        rng.shuffle(batches)
        yield from batches


def rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth."""
    if step < 200:
        return peak * (step + 1) / 200
    done = (step - 200) / max(1, steps - 200)
    return peak * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, done))))


class Trainer:
    """bfloat16 weights for the passes, float32 masters for AdamW."""

    def __init__(self, model: LlamaForCausalLM, steps: int, peak: float) -> None:
        self.model, self.steps, self.peak, self.step = model, steps, peak, 0
        self.body = torch.compile(model.model, dynamic=False)
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        matrices = [master for master in self.masters if master.ndim > 1]
        gains = [master for master in self.masters if master.ndim == 1]
        groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.05, fused=True)

    def loss(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted mean over the tokens.  Padding is on the right, so it needs no mask."""
        tokens, weights = tokens.long(), weights[:, 1:].float().flatten()
        hidden = self.body(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        where = weights.nonzero().squeeze(1)
        logits = self.model.lm_head(hidden.flatten(0, 1)[where]).float()
        wanted, weights = tokens[:, 1:].flatten()[where], weights[where]
        each = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        return (each * weights).sum() / weights.sum()

    def update(self, tokens: torch.Tensor, weights: torch.Tensor) -> float:
        loss = self.loss(tokens, weights)
        loss.backward()
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.step, self.steps, self.peak)
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        state = {"step": self.step, "masters": self.masters, "adam": self.optimizer.state_dict()}
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path)
        self.step = state["step"]
        self.optimizer.load_state_dict(state["adam"])
        with torch.no_grad():
            for index, kept in enumerate(state["masters"]):
                self.masters[index].copy_(kept)
                self.weights[index].copy_(kept)


@torch.no_grad()
def forced_accuracy(model: LlamaForCausalLM, tokenizer: Coder) -> str:
    """Exact match per task in one pass: greedy decoding is right just where each token is."""
    report = []
    for task in TASKS:
        rows = tokenised([e for e in demo_tasks.held_out() if e.task == task], tokenizer)
        good = total = 0
        for tokens, weights in (batch for bucket in rows for batch in bucket.batches(256)):
            made = model(input_ids=tokens[:, :-1].long(), use_cache=False).logits.argmax(-1)
            right = (made == tokens[:, 1:]) | (weights[:, 1:] < 1)
            good, total = good + int(right.all(1).sum()), total + len(tokens)
        report.append(f"{task} {good}/{total}")
    return "  ".join(report)


def train(trainer: Trainer, rows: Sequence[Rows], tokenizer: Coder, checkpoint: Path) -> None:
    losses: list[float] = []
    began = time.monotonic()
    batches = itertools.islice(endless(rows, SEED), trainer.step, trainer.steps)
    for batch in batches:
        losses.append(trainer.update(*batch))
        if trainer.step % 50 == 0:
            mean = sum(losses[-50:]) / len(losses[-50:])
            spent = time.monotonic() - began
            print(f"step {trainer.step}  loss {mean:.4f}  {spent:.0f} s", flush=True)
        if trainer.step % 250 == 0 or trainer.step == trainer.steps:
            print(forced_accuracy(trainer.model, tokenizer), flush=True)
            trainer.save(checkpoint)


def write_examples(path: Path) -> None:
    counts = dict.fromkeys(TASKS, 0)
    with path.open("w", encoding="utf-8") as file:
        for example in demo_tasks.held_out():
            counts[example.task] += 1
            row = {
                "id": f"{example.task}-{counts[example.task]:04}", "prompt": example.prompt,
                "expected": example.expected, "max_tokens": ANSWER_LIMIT[example.task],
            }  # fmt: skip
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_tokenizer(tokenizer: Coder, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(path / "tokenizer.json"))
    about: dict[str, object] = {}
    about |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    about |= {"clean_up_tokenization_spaces": False}
    about |= {"model_max_length": POSITIONS, "chat_template": CHAT}
    (path / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def write_model(model: LlamaForCausalLM, path: Path) -> None:
    end = model.config.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    model.save_pretrained(path)
    (path / "model.safetensors").chmod(0o644)


@torch.no_grad()
def measure(folder: Path, dtype: torch.dtype) -> str:
    """Exact match of real greedy decoding with the saved files, and the closest decision made."""
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    tokenizer = Coder.from_pretrained(folder / "model")
    right, gaps = dict.fromkeys(TASKS, 0), list[float]()
    for line in (folder / "examples.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"], return_tensors="pt", return_token_type_ids=False)
        made = model.generate(**prompt, max_new_tokens=row["max_tokens"], **SCORED)
        text = tokenizer.decode(made.sequences[0, prompt.input_ids.shape[1] :])
        right[row["id"].split("-")[0]] += text == f" {row['expected']}{END}"
        best = torch.stack(made.scores).float().squeeze(1).topk(2).values
        gaps.append(float((best[:, 0] - best[:, 1]).min()))
    gaps.sort()
    total = sum(right.values()) / len(gaps)
    return f"{dtype}: {total:.1%} {right}; closest gaps per row {[round(g, 3) for g in gaps[:5]]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the bundled demo model.")
    temporary = Path(tempfile.gettempdir()) / "freight-demo-checkpoint.pt"
    here = Path(__file__).resolve().parent.parent / "src" / "freight" / "demo"
    parser.add_argument("--out", type=Path, default=here)
    parser.add_argument("--checkpoint", type=Path, default=temporary)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--pool", type=int, default=600_000, help="training examples made")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--only-evaluate", action="store_true")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    if not options.only_evaluate:
        pool = list(itertools.islice(demo_tasks.training_stream(SEED, MIX), options.pool))
        if not options.resume:
            write_tokenizer(make_tokenizer(pool[:60_000]), options.out / "model")
        tokenizer = Coder.from_pretrained(options.out / "model")
        trainer = Trainer(make_model(tokenizer), options.steps, options.peak)
        if options.resume:
            trainer.load(options.checkpoint)
        train(trainer, tokenised(pool, tokenizer), tokenizer, options.checkpoint)
        write_model(trainer.model, options.out / "model")
        write_examples(options.out / "examples.jsonl")
    for dtype in (torch.float32, torch.bfloat16):
        print(measure(options.out, dtype))


if __name__ == "__main__":
    main()
