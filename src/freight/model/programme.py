"""The layer as data: steps over named values, each with the weights it uses.

This is the one description of the model. Parameters, FLOPs and bytes are counted from it, tensors
are computed by interpreting it (``layers``), and partitionings insert moves into it. It knows no
torch, no tier, no rank and no place in a schedule.

Dims are letters, which ``dims`` lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from freight.model.expert_steps import Clear, Combine, Dispatch, ExpertStep, Route, Weigh
from freight.model.kept_steps import AttendKept, KeptStep, ProjectGroups
from freight.model.latent_steps import (
    AbsorbKeys,
    ExpandValues,
    JoinLatent,
    LatentStep,
    SplitLatent,
    latent_elements,
)
from freight.model.number_format import Grouped
from freight.model.recurrent_steps import (
    Convolve,
    Deal,
    DeltaRule,
    RecurrentStep,
    Scan,
    state_numbers,
)
from freight.model.rope_config import RopeConfig
from freight.model.slope_steps import SlopeStep
from freight.model.stream_steps import (
    Average,
    Collapse,
    Expand,
    Spread,
    StreamStep,
    stream_elements,
)
from freight.model.value_steps import (
    Activate,
    Add,
    AddPositions,
    Cap,
    Clip,
    Gate,
    Level,
    Multiply,
    MultiplyColumns,
    Scale,
    ScaleBy,
    ValueStep,
    Xielu,
)
from freight.model.weight import Weight

__all__ = [
    "Activate",
    "Add",
    "AddPositions",
    "Attend",
    "Cap",
    "Clear",
    "Clip",
    "Combine",
    "Dispatch",
    "Embed",
    "Gate",
    "Level",
    "Multiply",
    "MultiplyColumns",
    "Norm",
    "Programme",
    "Project",
    "Rotate",
    "Route",
    "Scale",
    "ScaleBy",
    "Split",
    "Step",
    "Unit",
    "UnitKind",
    "Weigh",
    "Weight",
    "Xielu",
    "changed_values",
    "picking_unit",
]

UnitKind = Literal[
    "embedding", "attention", "queries", "recurrence", "mlp", "router", "expert", "head"
]
"""Of "queries" the keys are those of other units, which all tokens have left there."""
_MIXING: Final[tuple[UnitKind, ...]] = ("embedding", "attention", "recurrence")
"""Kinds that make of one token what others need, or begin with it."""
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
    ``first`` on; back again if ``backwards``"""

    x: str
    num_heads: int
    rope: RopeConfig
    first: int = 0
    backwards: bool = False


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Steps that run together on one micro-batch: the smallest thing whose weights are loaded.

    ``layer`` is the decoder layer, or None for the embedding and the head. The residual stream is
    the value ``x``; a head unit leaves its columns of the logits in ``logits``. A router's units
    are followed by all experts of its layer; of these only the chosen ones are run. ``runs`` is for
    who interprets steps, to keep how.
    """

    name: str
    kind: UnitKind
    layer: int | None
    steps: tuple[Step, ...]
    expert: int | None = None
    weights: tuple[Weight, ...] = field(init=False, compare=False, repr=False)
    num_elements: int = field(init=False, compare=False, repr=False)
    parts: list[Unit] = field(init=False, compare=False, repr=False, default_factory=list)
    runs: list[Any] = field(init=False, compare=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        found = (weight for step in self.steps for weight in _weights_of(step))
        weights = tuple(dict.fromkeys(found))
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "num_elements", sum(w.num_elements for w in weights))

    @property
    def has_window(self) -> bool:
        """Whether its tokens attend no more than the last ones before them."""
        return any(isinstance(step, Attend) and step.window is not None for step in self.steps)

    def halves(self) -> tuple[Unit, Unit]:
        """An attention unit up to what it attends, and from there; between them pass the values
        that pass from unit to unit, and what was attended. What else the second needs, as gates, it
        makes for itself."""
        if not self.parts:
            place = next(n for n, step in enumerate(self.steps) if isinstance(step, Attend))
            before, attend, behind = self.steps[:place], self.steps[place], self.steps[place + 1 :]
            assert isinstance(attend, Attend)
            attended = (name for name in (attend.q, attend.k, attend.v) if name is not None)
            of_queries, _ = _makers(before, attended)
            _, missing = _makers(behind, set(), all_of_them=True)
            again, _ = _makers(before, missing)
            for steps in ((*of_queries, attend), (*again, *behind)):
                part = Unit(name=self.name, kind=self.kind, layer=self.layer, steps=steps)
                self.parts.append(part)
        first, second = self.parts
        return first, second

    @property
    def tables(self) -> tuple[Weight, ...]:
        """Those that rows are looked up in, by token."""
        return tuple(step.weight for step in self.steps if isinstance(step, Embed))

    def keys(self) -> Unit | None:
        """Of an attention unit the steps that make keys and values of the residual stream; None
        where they take more than that, or there are none."""
        place = next(n for n, step in enumerate(self.steps) if isinstance(step, Attend))
        attend = self.steps[place]
        assert isinstance(attend, Attend)
        if attend.k is None or attend.v is None:
            return None
        steps, missing = _makers(self.steps[:place], {attend.k, attend.v})
        if missing != {"x"}:
            return None
        return Unit(name=self.name, kind=self.kind, layer=self.layer, steps=steps)

    @property
    def last_matrix(self) -> Weight:
        """That of its last product: of a head, the rows that make logits."""
        return next(s.weight for s in reversed(self.steps) if isinstance(s, Project))

    def matmul_flops(self, num_tokens: int) -> int:
        """Multiply-adds counted as two, products only."""
        products = (step for step in self.steps if isinstance(step, Project | ProjectGroups))
        elements = sum(step.weight.num_elements for step in products)
        elements += sum(latent_elements(step) + stream_elements(step) for step in self.steps)
        return 2 * num_tokens * elements

    def state_numbers(self) -> tuple[int, int]:
        """What it keeps of a row: numbers of the type that is computed with, and of float32."""
        numbers = [state_numbers(step) for step in self.steps]
        return sum(plain for plain, _ in numbers), sum(wide for _, wide in numbers)

    def attention_flops(self, num_query_key_pairs: int) -> int:
        """Of scores and weighted values, for that many (query, key) pairs over all rows."""
        steps = [s for s in self.steps if isinstance(s, Attend)]
        return sum(4 * s.num_heads * s.head_dim * num_query_key_pairs for s in steps)


def changed_values(step: Step) -> tuple[str, ...]:
    """Names of the values that a step makes or changes."""
    makes_one = Embed | Norm | Project | Attend | Dispatch | AbsorbKeys | ExpandValues
    if isinstance(step, Collapse):
        return (step.out,) if step.shares is None else (step.out, step.shares)
    if isinstance(step, makes_one | DeltaRule | Scan | SlopeStep | Spread | Average | KeptStep):
        return (step.out,)
    if isinstance(step, Deal):
        return tuple(dict.fromkeys(part.out for part in step.parts))
    if isinstance(step, SplitLatent):
        return step.latent, step.turned
    if isinstance(step, JoinLatent):
        return step.k, step.v
    if isinstance(step, Split):
        return step.q, step.k, step.v
    return () if isinstance(step, Route) else (step.x,)


def _makers(
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
        return step.x, step.turned
    if isinstance(step, Expand):
        return step.x, step.y, step.shares
    if isinstance(step, AttendKept):
        return step.q, step.kv
    if isinstance(step, Add | Multiply | Gate | Weigh | Combine):
        return step.x, step.y
    return (step.x,)


def _weights_of(step: Step) -> Iterator[Weight]:
    if isinstance(step, DeltaRule | Scan):
        yield from (step.decay, step.bias)
    if isinstance(step, Scan):
        yield step.skip
    if isinstance(step, Convolve) and step.bias is not None:
        yield step.bias
    if isinstance(step, Convolve):
        yield from step.weights
    if isinstance(step, AttendKept):
        yield step.sinks
        if step.compress is not None:
            yield from (step.compress.bias, step.compress.weight)
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
    if isinstance(step, Attend) and step.sinks is not None:
        yield step.sinks
    if isinstance(step, Collapse):
        yield from (step.weight, step.base, step.scale)
    if isinstance(step, Route):
        yield from (w for w in (step.corrections, step.gains, step.table) if w is not None)


def _form_of(unit: Unit) -> tuple[object, ...]:
    shapes = tuple((weight.num_rows, weight.num_columns) for weight in unit.weights)
    windows = tuple(step.window for step in unit.steps if isinstance(step, Attend))
    return unit.kind, len(unit.steps), shapes, windows


def picking_unit(kinds: Sequence[UnitKind], *, needs_all: bool) -> int:
    """The first unit behind the last one in which tokens see each other: what it would make of a
    token that is neither sampled after nor scored is of no use to any other. Where all are needed
    the first of the head."""
    if needs_all:
        return kinds.index("head")
    return 1 + max((n for n, kind in enumerate(kinds) if kind in _MIXING), default=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Programme:
    """A whole decoder: embedding, layers, output head in chunks, in the order of computation.

    ``carried`` has the values that pass from unit to unit, side by side: the name and the columns
    of each, the residual stream ``x`` first; ``stream_columns`` are those of all. ``kinds`` is one
    unit of each form, ``forms`` has for each unit a number that units of one form share: they take
    equally long. ``counted`` is one unit of each form, whether it works on what the head has picked
    alone, and the number of such units.
    From unit ``picks_at`` on, see :func:`picking_unit`, no token is computed but those that the
    head needs; ``needs_all`` of them where the residual stream goes on to other layers.
    """

    units: tuple[Unit, ...]
    carried: tuple[tuple[str, int], ...]
    needs_all: bool = False
    kinds: tuple[Unit, ...] = field(init=False, compare=False, repr=False)
    forms: tuple[int, ...] = field(init=False, compare=False, repr=False)
    picks_at: int = field(init=False, compare=False, repr=False)
    counted: tuple[tuple[Unit, bool, int], ...] = field(init=False, compare=False, repr=False)
    stream_columns: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        kinds: dict[tuple[object, ...], Unit] = {}
        numbers: dict[tuple[object, ...], int] = {}
        forms = []
        for unit in self.units:
            form = _form_of(unit)
            kinds.setdefault(form, unit)
            forms.append(numbers.setdefault(form, len(numbers)))
        object.__setattr__(self, "kinds", tuple(kinds.values()))
        object.__setattr__(self, "forms", tuple(forms))
        kinds_of_units = [unit.kind for unit in self.units]
        object.__setattr__(self, "needs_all", self.needs_all or self.sends)
        picks_at = picking_unit(kinds_of_units, needs_all=self.needs_all)
        object.__setattr__(self, "picks_at", picks_at)
        counts = Counter((form, n >= picks_at) for n, form in enumerate(forms))
        own = ((self.kinds[form], picked, count) for (form, picked), count in counts.items())
        object.__setattr__(self, "counted", tuple(own))
        object.__setattr__(self, "stream_columns", sum(columns for _, columns in self.carried))

    @property
    def embedding(self) -> Unit:
        return self.units[0]

    @property
    def receives(self) -> bool:
        """Whether the residual stream comes from other layers, on another device: then the first
        unit has no steps."""
        return not self.units[0].steps

    @property
    def sends(self) -> bool:
        """Whether it goes on to other layers: then the last unit has no steps."""
        return not self.units[-1].steps
