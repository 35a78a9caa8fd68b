"""Tiny random models, made by transformers from a config, as the oracle of the engine's tests.

The oracle runs row by row, so that nothing of it depends on padding or on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from freight.model.batch import MicroBatch
from freight.plan.beginnings import Beginnings, Shared
from freight.plan.workload import Workload
from freight.runtime.answers import NewTokens
from freight.runtime.engine import Engine, build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Request, SamplingParams
from freight.runtime.sampler import Draw

VOCAB = 320

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
}

ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "weights_percent": (0.0, 30.0, 70.0),
    "kv_percent": (0.0, 40.0, 60.0),
    "activations_percent": (0.0, 37.0, 63.0),
    "micro_batch_size": 2,
    "num_micro_batches": 2,
}
ON_SIM: dict[str, Any] = {
    "device": "sim",
    "weights_percent": (37.0, 21.0, 42.0),
    "kv_percent": (37.0, 21.0, 42.0),
    "activations_percent": (37.0, 21.0, 42.0),
    "cpu_attention_percent": 60.0,
    "micro_batch_size": 5,
    "num_micro_batches": 2,
}


def with_keys_near(options: Mapping[str, Any]) -> dict[str, Any]:
    """For models of which several layers attend the same keys."""
    return {**options, "kv_percent": None, "cpu_attention_percent": None}


def make_model(
    directory: Path,
    *,
    config: PretrainedConfig | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **changes: Any,
) -> PreTrainedModel:
    """A seeded Llama, or what ``config`` says, saved in ``directory``; returned in float32.

    Gains and biases are random too: as transformers makes them, 1 and 0, they would hide errors.
    """
    torch.manual_seed(0)
    config = config or LlamaConfig(**{**SIZES, **changes})
    sees = getattr(config, "vision_config", None) is not None
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.normal_(mean=float("norm" in name), std=0.3)
        for name, buffer in model.named_buffers():
            if "correction" in name or "expert_bias" in name:
                buffer.normal_(std=0.3)
            if "tid2eid" in name:
                buffer.random_(0, model.config.n_routed_experts)
            if name.endswith("rotary_emb.alpha"):
                buffer.normal_(std=0.3)
            if "layer_scalar" in name:
                buffer.normal_(mean=1.0, std=0.3)
    model = model.to(dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model.float().eval()


def workload(
    prompts: Sequence[Sequence[int]], max_tokens: int, params: SamplingParams | None = None
) -> Workload:
    """Of rows that all ask for ``max_tokens``, and for what ``params`` says besides."""
    longest = max(len(prompt) for prompt in prompts)
    asked = params or SamplingParams()
    return Workload(
        num_rows=len(prompts) * asked.n,
        max_prompt_tokens=longest,
        max_new_tokens=max_tokens,
        max_total_tokens=longest + max_tokens,
        total_prompt_tokens=sum(len(prompt) for prompt in prompts),
        total_new_tokens=max_tokens * len(prompts) * asked.n,
        min_samples=asked.n,
        max_samples=asked.n,
        max_scored_tokens=0 if asked.prompt_logprobs is None else longest - 1,
        max_listed_tokens=0 if asked.logprobs is None else max_tokens,
        max_logprobs=max(asked.logprobs or 0, asked.prompt_logprobs or 0),
        is_structured=asked.structured_outputs is not None,
    )


def begin_alike(
    work: Workload,
    *,
    keys: Sequence[int | None],
    tokens: Sequence[int],
    prompts: Sequence[int],
    new: Sequence[int],
    samples: Sequence[int],
) -> Workload:
    """A workload of requests with these lengths and samples whose prompts begin with so many tokens
    that all have that have the same key."""
    if all(key is None for key in keys):
        return work
    rows = sum(samples)
    mean = round(sum(count * n for count, n in zip(tokens, samples, strict=True)) / rows)
    groups = (Shared(mean, len({key for key in keys if key is not None})),)
    return replace(
        work,
        beginnings=Beginnings.of(
            groups,
            keys=np.array([-1 if key is None else key for key in keys]),
            tokens=np.array(tokens),
            prompts=np.array(prompts),
            totals=np.array(prompts) + np.array(new),
            rows=np.array(samples),
        ),
    )


@contextmanager
def engine(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    params: SamplingParams | None = None,
    **options: Any,
) -> Iterator[Engine]:
    """An engine in float32 that proves every operation before it runs, closed at the end."""
    defaults = {"dtype": "float32", "verify": True, "disk_dir": directory}
    built = build_engine(
        directory,
        options=EngineOptions(**{**defaults, **options}),
        workload=workload(prompts, max_tokens, params),
    )
    try:
        yield built
    finally:
        built.close()


def requests(prompts: Sequence[Sequence[int]], params: SamplingParams) -> Iterator[Request]:
    for index, prompt in enumerate(prompts):
        yield Request(index=index, prompt_ids=prompt, params=params)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    on_batch: Callable[[int, MicroBatch], None] | None = None,
    **params: Any,
) -> list[list[int]]:
    """New tokens of each prompt, in order; each row is answered exactly once."""
    settings = SamplingParams(max_tokens=max_tokens, **params)
    done: dict[int, list[int]] = {}
    for completion in engine.run(requests(prompts, settings), on_batch):
        assert completion.index not in done
        done[completion.index] = list(completion.token_ids)
    assert sorted(done) == list(range(len(prompts)))
    return [done[i] for i in range(len(prompts))]


def capture_logits(engine: Engine) -> dict[tuple[int, int], torch.Tensor]:
    """Logits [V] that ``engine`` samples from, by row and by the place of the token they make."""
    captured: dict[tuple[int, int], torch.Tensor] = {}
    sample = engine._sample

    def capture(logits: torch.Tensor, draws: Sequence[Draw]) -> NewTokens:
        for draw in draws:
            captured[draw.row.request, draw.position] = logits[draw.place].clone()
        return sample(logits, draws)

    engine._sample = capture  # type: ignore[method-assign]
    return captured


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The oracle's greedy tokens, and the logits [steps, V] that they were taken from."""

    token_ids: list[int]
    logits: torch.Tensor


def reference(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    steps: int,
    *,
    with_positions: bool = False,
) -> list[Answer]:
    """Greedy answers of transformers, a row at a time; it is told positions where it would count
    them from 0 at every step."""
    return [_answer(model, prompt, steps, with_positions) for prompt in prompts]


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@torch.inference_mode()
def _answer(
    model: PreTrainedModel, prompt: Sequence[int], steps: int, with_positions: bool
) -> Answer:
    # Scaled rotary embeddings remember the longest row so far: each row gets a fresh one, with what
    # was learnt.
    config = model.config.get_text_config()
    for module in model.modules():
        own = getattr(module, "rotary_emb", None)
        if own is not None and "Vision" not in type(own).__name__:
            module.rotary_emb = type(own)(config=getattr(own, "config", config))
            module.rotary_emb.load_state_dict(own.state_dict())
    cache, pending, token_ids, rows = None, list(prompt), [], []
    for _ in range(steps):
        end = len(prompt) + len(token_ids)
        places = torch.arange(end - len(pending), end)[None]
        more = {"position_ids": places} if with_positions else {}
        out = model(torch.tensor([pending]), past_key_values=cache, use_cache=True, **more)
        cache = out.past_key_values
        rows.append(out.logits[0, -1].float())
        pending = [int(rows[-1].argmax())]
        token_ids += pending
    return Answer(token_ids=token_ids, logits=torch.stack(rows))


def prompts(num_rows: int, longest: int, vocab: int = VOCAB, seed: int = 1) -> list[list[int]]:
    """Random prompts of 1 to ``longest`` tokens; one of them is as long as that."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num_rows,), generator=generator).tolist()
    lengths[num_rows // 2] = longest
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
