"""What is made of a row's last token: the odds of a next one, an embedding, or scores of labels.

Which it is, config.json says by its architecture, and the files that sentence-transformers keeps
beside it. Knows no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from freight.errors import ModelError

__all__ = ["PROBLEMS", "Readout", "decoders_of", "published_readout", "stated_readout"]

_CLASSIFIER: Final = "ForSequenceClassification"
_ALONE: Final = "Model"
_DECODERS: Final = ("ForCausalLM", "LMHeadModel")
_PART: Final = "Text"
"""In the names of the part that reads, of models that also see."""
PROBLEMS: Final = ("regression", "single_label_classification", "multi_label_classification")
_CAUSAL: Final = {"is_causal": True, "use_bidirectional_attention": False}
"""What config.json says of models whose tokens see those before them alone."""
_USUAL_LABELS: Final = 2
"""What transformers assumes where nothing is said."""
_LAST_TOKEN: Final = "pooling_mode_lasttoken"
_WHY_OTHERS: Final = "Freight reads the last token alone, which has seen all others."


@dataclass(frozen=True, kw_only=True, slots=True)
class Readout:
    """What a row's last token is read as, where that is not the odds of a next one: a number for
    each of ``labels``, or where there are none, the residual stream behind the last norm, an
    embedding.

    ``problem`` is what the numbers are for, in transformers' words, see ``PROBLEMS``; an embedding
    that ``is_unit`` is divided by its length.
    """

    labels: tuple[str, ...] = ()
    problem: str = "regression"
    is_unit: bool = True

    @property
    def name(self) -> str:
        """What is made, in a word for people."""
        return "scores of labels" if self.labels else "embeddings"

    @property
    def description(self) -> str:
        """All that answers depend on: files that say it may change between two runs."""
        if not self.labels:
            return f"{self.name}{' of length 1' if self.is_unit else ''}"
        return f"{self.name} {', '.join(map(repr, self.labels))}, for {self.problem}"


def decoders_of(architecture: str) -> tuple[str, ...]:
    """What architectures that generate with the same layers may be called, of one that labels or
    has no head."""
    for suffix in (_CLASSIFIER, _ALONE):
        if architecture.endswith(suffix):
            stem = architecture.removesuffix(suffix)
            stems = dict.fromkeys((stem, stem.removesuffix(_PART)))
            return tuple(own + decoder for own in stems for decoder in _DECODERS)
    return ()


def stated_readout(
    raw: Mapping[str, Any], known: Sequence[str], problems: list[str]
) -> Readout | None:
    """What config.json ``raw`` says by its first architecture, unless that is one of the ``known``
    ones, which generate; None for these. What is wrong is added to ``problems``."""
    architectures = raw.get("architectures") or []
    named = architectures if isinstance(architectures, list) else [architectures]
    if not named or named[0] in known or not isinstance(named[0], str):
        return None
    problems += _doubts(raw)
    if not named[0].endswith(_CLASSIFIER):
        return Readout() if named[0].endswith(_ALONE) else None
    labels = _labels(raw, problems)
    problem = raw.get("problem_type")
    if problem not in (None, *PROBLEMS):
        problems.append(f"problem_type is {problem!r}, it must be one of {', '.join(PROBLEMS)}")
    usual = PROBLEMS[0] if len(labels) == 1 else PROBLEMS[1]
    return Readout(labels=labels, problem=problem if problem in PROBLEMS else usual)


def _doubts(raw: Mapping[str, Any]) -> list[str]:
    """Why what is read would not be what the model's makers read, though it may look like it."""
    found = [
        f"{name} is {raw[name]!r}: tokens would see what follows them"
        for name, causal in _CAUSAL.items()
        if raw.get(name, causal) not in (None, causal)
    ]
    own = raw.get("auto_map")
    code = own.get("AutoModel") if isinstance(own, Mapping) else None
    if code is not None:
        found.append(f"its layers are run by code of its own ({code}), which may see what follows")
    return found


def _labels(raw: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    named, count = raw.get("id2label"), raw.get("num_labels", _USUAL_LABELS)
    if isinstance(named, Mapping) and named:
        found = {str(number): str(label) for number, label in named.items()}
        if {*found} == {str(number) for number in range(len(found))}:
            return tuple(found[str(number)] for number in range(len(found)))
        problems.append(f"id2label has the numbers {', '.join(found)}, expected 0 and up")
        return ("LABEL_0",)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        problems.append(f"num_labels is {count!r}, it must be a whole number, at least 1")
        return ("LABEL_0",)
    return tuple(f"LABEL_{number}" for number in range(count))


def published_readout(model_dir: Path, raw: Mapping[str, Any]) -> Readout | None:
    """What sentence-transformers' files beside a model say of it, beside its config.json ``raw``;
    None where there are none. Raises ModelError for embeddings that are made in another way."""
    modules = _read(model_dir / "modules.json")
    if not isinstance(modules, list):
        return None
    kinds = {}
    for module in modules:
        if isinstance(module, dict):
            kinds[str(module.get("type")).rpartition(".")[2]] = str(module.get("path") or "")
    if "Pooling" not in kinds:
        return None
    asked = f"The model in {model_dir} makes embeddings, by its modules.json."
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if others:
        raise ModelError(
            asked,
            f"Behind the decoder it has {', '.join(others)}, which Freight does not compute.",
            "Choose another model: without it the embeddings would be another's.",
        )
    if doubts := _doubts(raw):
        raise ModelError(
            asked,
            f"By its config.json {'; '.join(doubts)}.",
            "Choose another model: the embeddings would be another's.",
        )
    pooling = _read(model_dir / kinds["Pooling"] / "config.json")
    pooling = pooling if isinstance(pooling, dict) else {}
    modes = [name for name, value in pooling.items() if name.startswith("pooling_mode") and value]
    mode = pooling.get("pooling_mode")
    if modes != [_LAST_TOKEN] and mode != "lasttoken":
        said = " and ".join(modes) if mode is None else f"pooling_mode {mode!r}"
        raise ModelError(
            asked,
            f"They are read by {said or 'nothing that its files say'}. {_WHY_OTHERS}",
            "Choose a model whose embeddings are those of the last token.",
        )
    return Readout(is_unit="Normalize" in kinds)


def _read(path: Path) -> Any:
    """What a JSON file says; None where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
