"""The steps of a layer: what they take, what they make, and the weights they use.

Knows no torch, and no unit that they run in. Names of dims are letters, which ``dims`` lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from freight.model.expert_steps import Combine, Dispatch, ExpertStep, Route, Weigh
from freight.model.kept_steps import AttendChosen, AttendKept, KeptStep, ProjectGroups
from freight.model.latent_steps import (
    AbsorbKeys,
    ExpandValues,
    JoinLatent,
    LatentStep,
    SplitLatent,
)
from freight.model.number_format import Grouped
from freight.model.recurrent_steps import (
    Convolve,
    Deal,
    DeltaRule,
    RecurrentStep,
    Scan,
)
from freight.model.rope_config import RopeConfig
from freight.model.slope_steps import SlopeStep
from freight.model.stream_steps import (
    Average,
    Collapse,
    Expand,
    Spread,
    StreamStep,
)
from freight.model.value_steps import (
    Add,
    AddPositions,
    Gate,
    GrowHeads,
    Multiply,
    ScaleBy,
    ValueStep,
    Xielu,
)
from freight.model.weight import Weight

__all__ = [
    "Attend",
    "Embed",
    "Norm",
    "Project",
    "Rotate",
    "Split",
    "Step",
    "changed_values",
    "makers",
    "weights_of",
]

NormKind = Literal["rms", "rms_plus_one", "layer", "layer_plus_one", "layer_bare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Embed:
    """out[t] = weight[token t]"""

    out: str
    weight: Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """out = normalised x * weight (+ bias), in float32 inside; out may be x.

    "rms": x / rms(x); "layer": (x - mean) / deviation. "rms_plus_one" and "layer_plus_one": the
    same, times 1 + weight. "layer_bare": without a weight, which only says how wide x is. Rounded
    once, at the end. With ``num_heads`` each head is normalised.
    """

    x: str
    out: str
    kind: NormKind
    weight: Weight
    bias: Weight | None
    eps: float
    num_heads: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """out = x weight^T + bias, or out += that where it ``adds``. Of a weight that is some rows of
    a tensor the bias is that of all."""

    x: str
    out: str
    weight: Weight
    bias: Weight | None = None
    adds: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """q, k, v = x, whose columns are [K, N/K + 2, H]: by key/value head its queries, key, value"""

    x: str
    q: str
    k: str
    v: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotate:
    """Rotary position embedding of the heads of x, in place: of their first numbers, or from their
    ``first`` on; back again if ``backwards``; neighbours, or not, where ``pairs`` says so and not
    the rope"""

    x: str
    num_heads: int
    rope: RopeConfig
    first: int = 0
    backwards: bool = False
    pairs: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attend:
    """out = softmax(cap(scale q k^T)) v over the row's keys so far, k and v appended to them, or
    over those of another layer, which has its tokens' already, where they are None.

    cap(s) = softcap tanh(s / softcap), where there is one. Keys and values are kept in
    ``kv_format``, None for the type that is computed with; of the keys that a single query sees,
    the ``share`` with the highest scores count. Of ``sinks`` [N] each head has one, a score beside
    its keys' of a value that is zero.
    """

    q: str
    k: str | None
    v: str | None
    out: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    window: int | None = None
    kv_format: Grouped | None = None
    share: float = 1.0
    sinks: Weight | None = None


Step = (
    Embed
    | Norm
    | Project
    | Split
    | Rotate
    | Attend
    | ExpertStep
    | LatentStep
    | RecurrentStep
    | ValueStep
    | SlopeStep
    | StreamStep
    | KeptStep
)


def changed_values(step: Step) -> tuple[str, ...]:
    """Names of the values that a step makes or changes."""
    makes_one = Embed | Norm | Project | Attend | Dispatch | AbsorbKeys | JoinLatent | ExpandValues
    if isinstance(step, Collapse):
        return (step.out,) if step.shares is None else (step.out, step.shares)
    if isinstance(step, makes_one | DeltaRule | Scan | SlopeStep | Spread | Average | KeptStep):
        return (step.out,)
    if isinstance(step, Deal):
        return tuple(dict.fromkeys(part.out for part in step.parts))
    if isinstance(step, SplitLatent):
        return step.latent, step.turned
    if isinstance(step, Split):
        return step.q, step.k, step.v
    return () if isinstance(step, Route) else (step.x,)


def makers(
    steps: Sequence[Step], wanted: Iterable[str], *, all_of_them: bool = False
) -> tuple[tuple[Step, ...], set[str]]:
    """Of these steps those that the wanted values take, and the values that all of these take from
    elsewhere. With ``all_of_them`` none is left out."""
    missing, found = {*wanted}, list[Step]()
    for step in reversed(steps):
        if missing.isdisjoint(changed_values(step)) and not all_of_them:
            continue
        if not _is_in_place(step):
            missing.difference_update(changed_values(step))
        missing.update(_read_values(step))
        found.append(step)
    return tuple(found[::-1]), missing


def _is_in_place(step: Step) -> bool:
    """Whether what it changes is made of what was there."""
    if isinstance(step, Project):
        return step.adds
    makes_new = Embed | Norm | Split | Attend | Dispatch | LatentStep | Deal | SlopeStep | Collapse
    return not isinstance(step, makes_new)


def _read_values(step: Step) -> tuple[str, ...]:
    """Names of the values that a step around attention reads."""
    if isinstance(step, Embed | Attend):
        return ()
    if isinstance(step, JoinLatent):
        return (step.x,) if step.turned is None else (step.x, step.turned)
    if isinstance(step, Expand):
        return step.x, step.y, step.shares
    if isinstance(step, AttendKept):
        return step.q, step.kv
    if isinstance(step, AttendChosen):
        return step.q, step.k
    if isinstance(step, Add | Multiply | Gate | Weigh | Combine):
        return step.x, step.y
    return (step.x,)


def weights_of(step: Step) -> Iterator[Weight]:
    if isinstance(step, DeltaRule | Scan):
        yield from (step.decay, step.bias)
    if isinstance(step, Scan):
        yield step.skip
    if isinstance(step, Convolve) and step.bias is not None:
        yield step.bias
    if isinstance(step, Convolve):
        yield from step.weights
    if isinstance(step, AttendChosen) and step.sinks is not None:
        yield step.sinks
    if isinstance(step, AttendKept):
        yield step.sinks
        for own in step.compressors:
            yield from (own.bias, own.weight)
    single = (
        Embed | AddPositions | Norm | Project | ProjectGroups | AbsorbKeys | ExpandValues | ScaleBy
    )
    is_bare = isinstance(step, Norm) and step.kind == "layer_bare"
    if isinstance(step, single) and not is_bare:
        yield step.weight
    if isinstance(step, Norm | Project) and step.bias is not None:
        yield step.bias
    if isinstance(step, Xielu):
        yield from (step.positive, step.negative)
    if isinstance(step, GrowHeads):
        yield from (step.rate, step.bias)
    if isinstance(step, Attend) and step.sinks is not None:
        yield step.sinks
    if isinstance(step, Collapse):
        yield from (step.weight, step.base, step.scale)
    if isinstance(step, Route):
        yield from (w for w in (step.corrections, step.gains, step.table) if w is not None)
