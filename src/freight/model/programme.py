"""The layer as data: steps over named values, each with the weights it uses.

This is the one description of the model. Parameters, FLOPs and bytes are counted from it, tensors
are computed by interpreting it (``layers``), and partitionings insert moves into it. It knows no
torch, no tier, no rank and no place in a schedule.

Dims are letters, which ``dims`` lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from freight.model.expert_steps import Clear, Combine, Dispatch, Route, Weigh
from freight.model.kept_steps import ProjectGroups
from freight.model.latent_steps import latent_elements
from freight.model.recurrent_steps import state_numbers
from freight.model.steps import (
    Attend,
    Embed,
    Norm,
    Project,
    Rotate,
    Split,
    Step,
    changed_values,
    makers,
    weights_of,
)
from freight.model.stream_steps import stream_elements
from freight.model.value_steps import (
    Activate,
    Add,
    AddPositions,
    Cap,
    Clip,
    Gate,
    Grow,
    GrowHeads,
    Level,
    Multiply,
    MultiplyColumns,
    Scale,
    ScaleBy,
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
    "Grow",
    "GrowHeads",
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
        found = (weight for step in self.steps for weight in weights_of(step))
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
            of_queries, _ = makers(before, attended)
            _, missing = makers(behind, set(), all_of_them=True)
            again, _ = makers(before, missing)
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
        steps, missing = makers(self.steps[:place], {attend.k, attend.v})
        if missing != {"x"}:
            return None
        return Unit(name=self.name, kind=self.kind, layer=self.layer, steps=steps)

    @property
    def columns(self) -> range:
        """Of a head, those of the logits that it makes: by rows of a matrix, or by a norm alone."""
        own = next(s.weight for s in reversed(self.steps) if isinstance(s, Project | Norm))
        first, count = (own.first_row, own.num_rows) if own.is_matrix else (0, own.num_columns)
        return range(first, first + count)

    def matmul_flops(self, num_tokens: int) -> int:
        """Multiply-adds counted as two, products only."""
        products = (step for step in self.steps if isinstance(step, Project | ProjectGroups))
        elements = sum(step.weight.num_elements for step in products)
        elements += sum(latent_elements(step) + stream_elements(step) for step in self.steps)
        return 2 * num_tokens * elements

    def state_numbers(self) -> tuple[int, int]:
        """What it keeps of a row and changes by each token: numbers of the type that is computed
        with, and of float32."""
        numbers = [state_numbers(step) for step in self.steps]
        return sum(plain for plain, _ in numbers), sum(wide for _, wide in numbers)

    def attention_flops(self, num_query_key_pairs: int) -> int:
        """Of scores and weighted values, for that many (query, key) pairs over all rows."""
        steps = [s for s in self.steps if isinstance(s, Attend)]
        return sum(4 * s.num_heads * s.head_dim * num_query_key_pairs for s in steps)


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
