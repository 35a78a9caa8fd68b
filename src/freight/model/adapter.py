"""A low-rank adapter (LoRA, Hu et al., 2021), as PEFT keeps one: what it adds to which matrices.

In place of a matrix W stands W + scale * B A, with A [r, columns] and B [rows, r]; one that is
weight-decomposed (DoRA, Liu et al., 2024) gives each row of that sum a length of its own. Some
tensors it has whole. Knows names, types and shapes, reads headers alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from freight.errors import InputError, ModelError
from freight.model.families import Place
from freight.model.readout import PROBLEMS, Readout
from freight.model.safetensors_files import read_safetensors_file
from freight.model.sources import ADAPTED, Packed, TensorSource
from freight.model.switches import DTYPE_BYTES, ModelConfig

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "Adapter",
    "adapted",
    "as_adapted",
    "directory_of",
    "has_adapter",
    "inner_name",
    "read_adapter",
    "refuse_adapter",
]

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"

_WRAPPER: Final = "base_model.model."
"""Before the names that the model itself has for its modules."""
_PREFIXES: Final = re.compile(r"(?:(?:model|language_model|text_model|thinker|transformer)\.)*")
"""Of what a decoder is a part of: checkpoints and classes differ in it."""
_PART: Final = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.weight)?"
)
_PARTS: Final = {
    "lora_A": "down",
    "lora_B": "up",
    "lora_embedding_A": "table down",
    "lora_embedding_B": "table up",
    "lora_magnitude_vector": "lengths",
}
_SAVED: Final = re.compile(r"\.(?:modules_to_save(?:\.default)?|base_layer|original_module)\b")
_TRAINED: Final = ".modules_to_save"
_ORIGINAL: Final = ".original_module"
"""In names of tensors that are there twice, as they were trained and as they were before."""
_OTHER: Final = re.compile(r"\.(lora_\w+|trainable_tokens_\w+)")
_KNOWN: Final = ("use_rslora", "use_dora")
_CHANGED_BASES: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of what ``init_lora_weights`` is where the model's own weights were changed, too."""
_OTHER_SUMS: Final = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "velora_config",
)
"""What adapters say whose sum is another."""
_READABLE: Final = "Freight reads LoRA, rsLoRA and DoRA as PEFT saves them."
_ADVICE: Final = "Merge it into the model with PEFT (merge_and_unload) and save that."


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """What an adapter changes: ``parts`` of the sum by the module's name, with its ``scale``, and
    the tensors that it has ``saved``, by theirs; names as far as ``inner_name`` leaves them. Of
    some of these it has the ``originals``, too.

    ``task`` is what it was trained for, in PEFT's words. With ``ties`` a head that is the embedding
    stays it.
    """

    parts: Mapping[str, Mapping[str, TensorSource]]
    scales: Mapping[str, float]
    saved: Mapping[str, TensorSource]
    originals: Mapping[str, TensorSource]
    task: str | None
    ties: bool

    def touches(self, tensor: str) -> bool:
        """Whether a tensor of the checkpoint is another with it."""
        return self.adds_to(tensor) or self.find(tensor) is not None

    def adds_to(self, tensor: str) -> bool:
        """Whether something is added to it."""
        return inner_name(tensor).removesuffix(".weight") in self.parts

    def unties(self, head: str, embedding: str, num_rows: int) -> bool:
        """Whether a head that is the embedding's table of so many rows becomes another: one that
        was only made for more tokens stays both."""
        is_trained = self.adds_to(embedding) or inner_name(embedding) in self.originals
        is_trained |= self.touches(embedding) and not self.has_more(embedding, num_rows)
        return self.touches(head) or (is_trained and not self.ties)

    def has_more(self, embedding: str, num_rows: int) -> bool:
        """Whether a table of so many rows was made for other tokens."""
        saved = self.find(embedding)
        return saved is not None and saved.shape[0] != num_rows

    def find(self, tensor: str) -> TensorSource | None:
        """A tensor that it has whole."""
        return self.saved.get(inner_name(tensor))


def inner_name(name: str) -> str:
    """A tensor's or module's name without that of what it is a part of."""
    return _PREFIXES.sub("", name, count=1)


def has_adapter(model_dir: Path) -> bool:
    """Whether an adapter lies beside a model's weights."""
    return (model_dir / ADAPTER_CONFIG).is_file()


def directory_of(model_dir: Path) -> Path:
    """Where the adapter beside a model's weights was published: there it may be a link."""
    return (model_dir / ADAPTER_CONFIG).resolve().parent


def refuse_adapter(model_dir: Path) -> None:
    """InputError where there is one, of a model with random weights."""
    if has_adapter(model_dir):
        raise InputError(
            f"Random weights were asked for with the adapter in {directory_of(model_dir)}.",
            "It adds to the weights that it was trained on alone.",
            "Leave one of the two out: an adapter changes nothing of how fast a model runs.",
        )


def read_adapter(model_dir: Path) -> Adapter | None:
    """The adapter that lies beside a model's weights; None where there is none. Raises ModelError
    for one that is damaged, or adds something else."""
    path = model_dir / ADAPTER_CONFIG
    if not has_adapter(model_dir):
        return None
    asked = f"The adapter in {directory_of(model_dir)} was asked for."
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(asked, [f"{ADAPTER_CONFIG} is no JSON ({error})"]) from error
    if not isinstance(raw, dict):
        raise _damaged(asked, [f"{ADAPTER_CONFIG} holds no JSON object"])
    if others := _others(raw):
        raise ModelError(asked, f"It has {', '.join(others)}. {_READABLE}", _ADVICE)
    if not (model_dir / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            asked,
            f"It has no {ADAPTER_WEIGHTS}. Pickled files (adapter_model.bin) are not loaded: they "
            "can run code.",
            "Save it as safetensors once: PeftModel.save_pretrained does.",
        )
    problems: list[str] = []
    tensors = read_safetensors_file(model_dir / ADAPTER_WEIGHTS, problems)
    own = _sort(tensors, raw, problems)
    if problems:
        raise _damaged(asked, problems)
    return own


def _others(raw: Mapping[str, Any]) -> list[str]:
    """What the configuration says that is not read."""
    kind = str(raw.get("peft_type"))
    if kind.upper() != "LORA":
        return [f"the peft_type {kind}"]
    start = str(raw.get("init_lora_weights", True)).lower()
    found = [f"{name} {raw[name]!r}" for name in _OTHER_SUMS if raw.get(name)]
    found += [
        f"{name} {value!r}"
        for name, value in raw.items()
        if name.startswith("use_") and name not in _KNOWN and value
    ]
    if start.startswith(_CHANGED_BASES):
        found.append(f"init_lora_weights {start!r}, which changes the model's own weights, too")
    return found


def _sort(
    tensors: Mapping[str, TensorSource], raw: Mapping[str, Any], problems: list[str]
) -> Adapter:
    parts: dict[str, dict[str, TensorSource]] = {}
    saved: dict[str, TensorSource] = {}
    originals: dict[str, TensorSource] = {}
    trained: set[str] = set()
    spelt: dict[str, str] = {}
    if not tensors:
        problems.append("it has no tensors")
    for full, source in tensors.items():
        given = _SAVED.sub("", full.removeprefix(_WRAPPER))
        name = inner_name(given)
        if source.dtype not in DTYPE_BYTES:
            problems.append(f"{full} is of type {source.dtype}, which is not supported")
        elif (found := _PART.fullmatch(name)) is not None:
            own_parts, part = parts.setdefault(found[1], {}), _PARTS[found[2]]
            if part in own_parts:
                problems.append(f"it has two tensors {found[1]}.{found[2]}")
            own_parts[part] = source
            spelt[found[1]] = given[: given.index(f".{found[2]}")]
        elif _OTHER.search(name):
            problems.append(f"{full} is nothing that is known of such an adapter")
        elif _ORIGINAL in full:
            originals[name] = source
        elif name not in saved or (_TRAINED in full and name not in trained):
            saved[name] = source
            trained |= {name} if _TRAINED in full else set()
        elif name not in trained or _TRAINED in full:
            problems.append(f"it has two tensors {name}")
    sums, scales = {}, {}
    for module, own in parts.items():
        if (whole := _whole(module, own, problems)) is not None:
            if ("lengths" in whole) != bool(raw.get("use_dora")):
                lacks = "no lengths" if raw.get("use_dora") else "lengths"
                problems.append(f"{module} has {lacks}, and use_dora is {raw.get('use_dora')}")
            sums[module] = whole
            scales[module] = _scale(spelt[module], whole["down"].shape[0], raw, problems)
    return Adapter(
        parts=sums,
        scales=scales,
        saved=saved,
        originals=originals,
        task=raw.get("task_type"),
        ties=bool(raw.get("ensure_weight_tying")),
    )


def _whole(
    module: str, own: Mapping[str, TensorSource], problems: list[str]
) -> dict[str, TensorSource] | None:
    """The parts of a sum by the names "down", "up" and "lengths", where they fit; those of a table,
    which are kept for its columns, have their names with "table"."""
    is_table = "table down" in own or "table up" in own
    down, up = (own.get(f"{'table ' if is_table else ''}{name}") for name in ("down", "up"))
    if down is None or up is None:
        problems.append(f"{module} has only one of its two matrices")
    elif len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        problems.append(f"the two matrices of {module}, of shapes {shapes}, have no product")
    elif is_table and "lengths" in own:
        problems.append(f"{module} is a table, whose rows' lengths are not read")
    else:
        lengths = own.get("lengths")
        found = {"table": down} if is_table else {}
        found |= {} if lengths is None else {"lengths": lengths}
        return {"down": down, "up": up, **found}
    return None


def _scale(module: str, rank: int, raw: Mapping[str, Any], problems: list[str]) -> float:
    """Of the module's sum: alpha by the rank, or by its root (rsLoRA, Kalajdzievski, 2023)."""
    alpha = raw.get("lora_alpha", 8)
    try:
        for pattern, value in (raw.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        scale = float(alpha) / (math.sqrt(rank) if raw.get("use_rslora") else rank)
        if math.isfinite(scale):
            return scale
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, re.error):
        pass
    problems.append(f"the scale of {module}, of alpha {alpha!r} and rank {rank}, is no number")
    return 0.0


def as_adapted(config: ModelConfig, adapter: Adapter, embedding: Place | None) -> ModelConfig:
    """With the tokens for which an adapter has made the ``embedding`` larger, and for what it was
    trained: labels have no names where the model has none."""
    table = adapter.find(embedding) if isinstance(embedding, str) else None
    if table is not None:
        config = replace(config, vocab_size=table.shape[0])
    own, scores = config.readout, adapter.find("score.weight")
    if adapter.task == "SEQ_CLS" and scores is None and (own is None or not own.labels):
        raise ModelError(
            "The adapter was trained to label, as its task_type SEQ_CLS says.",
            "It has no score.weight, and the model that it is added to has no labels.",
            "Save it with what was trained beside it (modules_to_save), or give its model.",
        )
    if scores is not None:
        count = scores.shape[0]
        if own is None or len(own.labels) != count:
            labels = tuple(f"LABEL_{number}" for number in range(count))
            own = Readout(labels=labels, problem=PROBLEMS[0 if count == 1 else 1])
    elif adapter.task == "FEATURE_EXTRACTION" and own is None:
        own = config.embedding
    return replace(config, readout=own)


def adapted(
    found: Mapping[str, TensorSource],
    adapter: Adapter,
    *,
    head: str | None,
    embedding: str | None,
    is_turned: Callable[[str], bool],
) -> tuple[dict[str, TensorSource], list[str]]:
    """The tensors of a checkpoint with what an adapter makes of them, and what does not fit. Where
    it changes a ``head`` that the checkpoint lacks, or the ``embedding`` alone, that is the
    embedding's own. ``is_turned`` says which matrices are kept as [columns, rows]."""
    sources, problems = dict(found), []
    names: dict[str, str] = {}
    for name in found:
        inner = inner_name(name)
        if inner in names and adapter.touches(name):
            problems.append(f"the model has two tensors {inner}")
        names[inner] = name
    table = _untied(found, names, adapter, head, embedding)
    if head is not None and table is not None:
        sources[head], names[inner_name(head)] = found[table], head
    for inner, saved in adapter.saved.items():
        place = names.get(inner)
        if place is None and not inner.startswith("score."):
            problems.append(f"the model has no {inner}")
        elif place is not None and found.get(place, saved).dtype not in DTYPE_BYTES:
            problems.append(f"{inner} is quantised in the model")
        else:
            sources[place or inner] = _in_place(sources.get(place or inner, saved), saved)
    if head is not None and table is not None and adapter.find(head) is None:
        before = adapter.originals.get(inner_name(table))
        has_more = adapter.has_more(table, found[table].shape[0])
        kept = sources[table] if has_more else found[table]
        sources[head] = kept if before is None else _in_place(found[table], before)
    for module, parts in adapter.parts.items():
        own_name = names.get(f"{module}.weight")
        if own_name is None:
            problems.append(f"{module} has no weight in the model, or one that is quantised")
            continue
        scale = adapter.scales[module]
        source = _add(sources[own_name], parts, scale, is_turned(own_name))
        if isinstance(source, TensorSource):
            sources[own_name] = source
        else:
            problems.append(f"{module} {source}")
    return sources, problems


def _untied(
    found: Mapping[str, TensorSource],
    names: Mapping[str, str],
    adapter: Adapter,
    head: str | None,
    embedding: str | None,
) -> str | None:
    """The table that is the head as well, where the adapter makes two of them."""
    table = None if embedding is None else names.get(inner_name(embedding))
    if head is None or table is None or inner_name(head) in names:
        return None
    return table if adapter.unties(head, table, found[table].shape[0]) else None


def _in_place(own: TensorSource, saved: TensorSource) -> TensorSource:
    """What an adapter has saved, in the type of what it stands for."""
    packed = Packed(scheme=ADAPTED, parts={"rows": saved})
    return replace(saved, dtype=own.dtype, packed=None if own.dtype == saved.dtype else packed)


def _add(
    own: TensorSource, parts: Mapping[str, TensorSource], scale: float, is_turned: bool
) -> TensorSource | str:
    """The sum in place of a matrix, or why there is none."""
    if own.dtype not in DTYPE_BYTES or len(own.shape) != 2:
        return f"has a weight of type {own.dtype} and shape {list(own.shape)}: it is quantised"
    down, up = parts["down"], parts["up"]
    upright = (up.shape[0], down.shape[1])
    # A table's are for the columns that its rows are.
    turned = is_turned or "table" in parts
    if own.shape != (upright[::-1] if turned else upright):
        return f"is a matrix of {list(own.shape)} in the model, and of {list(upright)} here"
    rows = own if own.packed is None else own.packed.parts["rows"]
    named = {"rows": rows, "down": down, "up": up}
    if (lengths := parts.get("lengths")) is not None:
        if turned or math.prod(lengths.shape) != own.shape[0]:
            return f"has lengths of shape {list(lengths.shape)}, which are not those of its rows"
        named["lengths"] = lengths
    return replace(own, packed=Packed(scheme=ADAPTED, parts=named, scale=scale, turned=turned))


def _damaged(asked: str, problems: list[str]) -> ModelError:
    return ModelError(
        asked,
        f"It cannot be used: {'; '.join(problems[:12])}.",
        "Fetch it again, or check that it was trained on this model.",
    )
