"""What is made of a row's last token: the odds of a next one, an embedding, or scores of labels.

Which it is, config.json says by its architecture; what sentence-transformers' files say beside it
is in ``published``. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["PROBLEMS", "STREAM", "Readout", "decoders_of", "doubts_of", "stated_readouts"]

_CLASSIFIER: Final = "ForSequenceClassification"
_ALONE: Final = "Model"
_DECODERS: Final = ("ForCausalLM", "LMHeadModel")
_PART: Final = "Text"
"""In the names of the part that reads, of models that also see."""
PROBLEMS: Final = ("regression", "single_label_classification", "multi_label_classification")
_CAUSAL: Final[Mapping[str, tuple[object, ...]]] = {
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False, "vision"),
}
"""What config.json says of models whose tokens of text see those before them alone."""
_USUAL_LABELS: Final = 2
"""What transformers assumes where nothing is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readout:
    """What a row's last token is read as, where that is not the odds of a next one: a number for
    each of ``labels``, or where there are none, the residual stream behind the last norm, an
    embedding.

    ``problem`` is what the numbers are for, in transformers' words, see ``PROBLEMS``. An embedding
    that ``is_unit`` is divided by its length; its first ``dimensions`` are given unless a user
    wants others (None: all). A ``prompt`` is put before texts, which may come to ``most_tokens``
    with it, where the model's makers say so. ``doubts`` are why an embedding would be another than
    theirs.
    """

    labels: tuple[str, ...] = ()
    problem: str = "regression"
    is_unit: bool = True
    dimensions: int | None = None
    prompt: str = ""
    most_tokens: int | None = None
    doubts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What is made, in a word for people."""
        return "scores of labels" if self.labels else "embeddings"

    @property
    def is_reward(self) -> bool:
        """Whether its one number is no label's."""
        return len(self.labels) == 1 and self.problem == PROBLEMS[0]

    @property
    def description(self) -> str:
        """All that answers depend on: files that say it may change between two runs."""
        if self.labels:
            named = ", ".join(f'"{label}"' for label in self.labels)
            return f"{self.name} {named}, for {self.problem}"
        told = f"{self.name}{' of length 1' if self.is_unit else ''}"
        told += "" if self.dimensions is None else f", {self.dimensions} dimensions"
        told += f', of texts behind "{self.prompt}"' if self.prompt else ""
        return told + ("" if self.most_tokens is None else f", up to {self.most_tokens} tokens")


STREAM: Final = Readout()
"""An embedding of which the model's files say nothing."""


def decoders_of(architecture: str) -> tuple[str, ...]:
    """What architectures that generate with the same layers may be called, of one that labels or
    has no head."""
    for suffix in (_CLASSIFIER, _ALONE):
        if architecture.endswith(suffix):
            stem = architecture.removesuffix(suffix)
            stems = dict.fromkeys((stem, stem.removesuffix(_PART)))
            return tuple(own + decoder for own in stems for decoder in _DECODERS)
    return ()


def stated_readouts(
    raw: Mapping[str, Any], known: Sequence[str], problems: list[str]
) -> tuple[Readout | None, Readout]:
    """What config.json ``raw`` says by its first architecture, unless that is one of the ``known``
    ones, which generate; None for these. And what embeddings are, where they are asked for. What is
    wrong is added to ``problems``."""
    architectures = raw.get("architectures") or []
    named = architectures if isinstance(architectures, list) else [architectures]
    if not named or named[0] in known or not isinstance(named[0], str):
        return None, Readout(doubts=doubts_of(raw, generates=True))
    problems += doubts_of(raw)
    if not named[0].endswith(_CLASSIFIER):
        return (STREAM if named[0].endswith(_ALONE) else None), STREAM
    labels = _labels(raw, problems)
    problem = raw.get("problem_type")
    if problem not in (None, *PROBLEMS):
        problems.append(f"problem_type is {problem!r}, it must be one of {', '.join(PROBLEMS)}")
    usual = PROBLEMS[0] if len(labels) == 1 else PROBLEMS[1]
    return Readout(labels=labels, problem=problem if problem in PROBLEMS else usual), STREAM


def doubts_of(raw: Mapping[str, Any], *, generates: bool = False) -> tuple[str, ...]:
    """Why what is read would not be what the model's makers read, though it may look like it.

    Code of its own that also ``generates`` is taken for the layers that Freight knows by the
    architecture's name, as where tokens are made."""
    found = [
        f"{name} is {str(raw[name]).lower()}: tokens would see what follows them"
        for name, causal in _CAUSAL.items()
        if raw.get(name) not in causal
    ]
    own = raw.get("auto_map")
    own = own if isinstance(own, Mapping) else {}
    code, generator = (str(own.get(name, "")) for name in ("AutoModel", "AutoModelForCausalLM"))
    is_known = generates and code.rpartition(".")[0] == generator.rpartition(".")[0]
    if code and not is_known:
        found.append(f"its layers are run by code of its own ({code}), which may see what follows")
    return tuple(found)


def _labels(raw: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    """Of a mapping from numbers, or a list; else as many as are counted."""
    named, count = raw.get("id2label"), raw.get("num_labels")
    if count is not None and (type(count) is not int or count < 1):
        problems.append(f"num_labels is {count!r}, it must be a whole number, at least 1")
        return ("LABEL_0",)
    if isinstance(named, list):
        named = dict(enumerate(named))
    if not isinstance(named, Mapping) or not named:
        if named:
            problems.append(f"id2label is {named!r}, it must name labels by their numbers")
        count = _USUAL_LABELS if count is None else count
        return tuple(f"LABEL_{number}" for number in range(count))
    found = {str(number): str(label) for number, label in named.items()}
    if {*found} != {str(number) for number in range(len(found))}:
        problems.append(f"id2label has the numbers {', '.join(found)}, expected 0 and up")
        return ("LABEL_0",)
    if count not in (None, len(found)):
        problems.append(f"num_labels is {count}, and id2label names {len(found)}")
    twice = {label for label in found.values() if [*found.values()].count(label) > 1}
    problems += [f'id2label names "{label}" twice' for label in sorted(twice)]
    return tuple(found[str(number)] for number in range(len(found)))
