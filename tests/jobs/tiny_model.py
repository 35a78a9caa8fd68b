"""A tiny byte-level BPE tokenizer in a model directory, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = ["the cat sat on the mat", "freight trains move the most per dollar", "naïve 日本 😀"]


def write_tiny_tokenizer(model_dir: Path, *, with_bos: bool = True) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "chat_template": (
            "{{ bos_token }}{% for m in messages %}\n"
            "    {% if m.role == 'broken' %}{{ raise_exception('no such role') }}{% endif %}\n"
            "[{{ m.role }}] {{ m.content | tojson }}\n{% endfor %}"
            "{% if add_generation_prompt %}[answer]{% endif %}"
        ),
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    return model_dir
