"""Tiny random models, made by transformers from a config, as the oracle of the engine's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from freight.plan.workload import Workload
from freight.runtime.engine import Engine, build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Request, SamplingParams


def make_model(
    directory: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **changes: Any
) -> PreTrainedModel:
    """A seeded Llama, or what ``config`` says, saved in ``directory``; returned in float32."""
    config = changes.pop("config", None) or LlamaConfig(
        **{
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "eos_token_id": None,
            "bos_token_id": None,
            **changes,
        }
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model = model.to(dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model.float().eval()


def workload(prompts: Sequence[Sequence[int]], max_tokens: int) -> Workload:
    longest = max(len(prompt) for prompt in prompts)
    return Workload(
        num_rows=len(prompts),
        max_prompt_tokens=longest,
        max_new_tokens=max_tokens,
        max_total_tokens=longest + max_tokens,
        total_prompt_tokens=sum(len(prompt) for prompt in prompts),
        total_new_tokens=max_tokens * len(prompts),
    )


def build(
    directory: Path, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any
) -> Engine:
    defaults = {"dtype": "float32", "verify": True, "disk_dir": directory}
    return build_engine(
        directory,
        options=EngineOptions(**{**defaults, **options}),
        workload=workload(prompts, max_tokens),
    )


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """New tokens of each prompt, in order."""
    requests = (
        Request(index=i, prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)
    )
    done = {completion.index: list(completion.token_ids) for completion in engine.run(requests)}
    assert sorted(done) == list(range(len(prompts)))
    return [done[i] for i in range(len(prompts))]


def reference(model: PreTrainedModel, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """Greedy tokens by plain forward passes, a row at a time."""
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = model.generate(
                torch.tensor([list(prompt)]),
                max_new_tokens=steps,
                do_sample=False,
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                pad_token_id=0,
            )
            outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def prompts(num_rows: int, longest: int, vocab: int = 320, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num_rows,), generator=generator).tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
