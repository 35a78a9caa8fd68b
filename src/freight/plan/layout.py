"""Where each row of each weight lies, and in which pieces the rest is brought to the arithmetic.

Split by rows of matrices, in any fractions. A unit's streamed rows pass through a slot on the
compute tier; a *piece* is one read or copy into it. Reads cover whole 4 KiB blocks of the file, so
that they can bypass the page cache, and keep each tensor's place within its block. Knows byte
ranges and tiers, but no tensors and no devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from freight.model.number_format import (
    Compressed,
    find_compressed,
    is_widened,
)
from freight.model.programme import Programme, Project, Unit, Weight
from freight.model.sources import TensorSource
from freight.model.switches import DTYPE_BYTES
from freight.plan.forms import BLOCK, Forms, find_forms, in_file_order
from freight.plan.parts import Part, Piece, SlotPart, Stretch, granule_rows, mixed
from freight.plan.policy import Policy, Split, Tier
from freight.quantities import align_down, align_up

__all__ = ["Table", "UnitLayout", "WeightLayout", "lay_out"]

_ALIGNMENT: Final = 64
"""Of matrices: a device's products want 16 bytes, copies a line of the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitLayout:
    """One unit's parts. ``resident`` ones stay on the compute tier, ``streamed`` ones pass through
    a slot; ``host_bytes`` of the latter lie on the cpu tier meanwhile. They come in ``stretches``,
    a piece of up to ``piece_bytes`` at a time."""

    unit: Unit
    resident: tuple[Part, ...]
    streamed: tuple[SlotPart, ...]
    stretches: tuple[Stretch, ...]
    piece_bytes: int
    slot_bytes: int
    host_bytes: int
    decoded_bytes: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """In the order in which they come. Cut anew each time: a search for a plan looks at many
        layouts, and at few pieces."""
        cut = (piece for stretch in self.stretches for piece in stretch.pieces(self.piece_bytes))
        return tuple(mixed(cut))

    def streamed_bytes(self, tier: Tier) -> tuple[int, int]:
        """Bytes that come from ``tier``: (wanted, moved with alignment)."""
        own = [stretch for stretch in self.stretches if stretch.tier == tier]
        return sum(s.logical_bytes for s in own), sum(s.num_bytes for s in own)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.resident + tuple(streamed.part for streamed in self.streamed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One that rows are looked up in, by token. Its parts are those of the head, in chunks, where
    it ``is_head``."""

    weight: Weight
    parts: tuple[Part, ...]
    is_head: bool = False

    def is_far(self, home: Tier) -> bool:
        """Whether any of it is elsewhere than where the arithmetic is."""
        return any(part.tier != home for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayout:
    """All units but the embedding, the head's chunks included. The embedding's ``tables`` are never
    streamed, rows are looked up. What else the embedding unit has stays on the compute tier:
    ``entrance``.

    Units of one form, with tensors that lie alike in their files, are laid out alike: ``forms`` has
    one of each, ``form_of`` says which of them each unit is. Sizes follow from these alone; the
    units themselves are laid out when they are first asked for.

    ``stream_columns`` is the width of what passes from unit to unit, ``kinds`` one unit of each
    shape. ``held_bytes`` is what weights take in each memory: whole blocks per unit, as allocated.
    ``compressed`` has those weights of forms, tables and the entrance that are, by name, and how.
    """

    programme: Programme
    entrance: UnitLayout
    forms: tuple[UnitLayout, ...]
    form_of: tuple[int, ...]
    tables: tuple[Table, ...]
    compute_tier: Tier
    element_bytes: int
    lay_out_unit: Callable[[Unit], UnitLayout] = field(compare=False, repr=False)
    held_bytes: Mapping[Tier, int] = field(init=False, compare=False, repr=False)
    compressed: Mapping[str, Compressed] = field(init=False, compare=False, repr=False)
    made: list[UnitLayout] = field(init=False, compare=False, repr=False)
    counts: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """For each form the number of its units."""

    def __post_init__(self) -> None:
        counts = Counter(self.form_of)
        object.__setattr__(self, "counts", tuple(counts[form] for form in range(len(self.forms))))
        object.__setattr__(self, "held_bytes", self._held_bytes())
        object.__setattr__(self, "compressed", self._compressed())
        object.__setattr__(self, "made", [])

    @property
    def units(self) -> Sequence[UnitLayout]:
        """Each unit, in order, without the embedding."""
        if not self.made:
            self.made.extend(map(self.lay_out_unit, self.programme.units[1:]))
        return self.made

    @property
    def all_units(self) -> tuple[UnitLayout, ...]:
        """Numbered as in the programme: 0 is the embedding."""
        return (self.entrance, *self.units)

    @property
    def kinds(self) -> tuple[Unit, ...]:
        return self.programme.kinds

    @property
    def stream_columns(self) -> int:
        return self.programme.stream_columns

    def form(self, unit: int) -> UnitLayout:
        """A layout of the form of the unit of this number in the programme."""
        return self.forms[self.form_of[unit - 1]] if unit else self.entrance

    def counted(self) -> Iterator[tuple[UnitLayout, int]]:
        """Each form, the embedding's among them, with the number of its units."""
        yield self.entrance, 1
        yield from zip(self.forms, self.counts, strict=True)

    @property
    def expert_bytes(self) -> int:
        """Of all experts, as they are in memory."""
        return sum(
            count * part.num_bytes
            for form, count in zip(self.forms, self.counts, strict=True)
            if form.unit.expert is not None
            for part in form.parts
        )

    def tier_bytes(self) -> dict[Tier, int]:
        """Bytes of weights on each tier, as they are in memory there, so that shares compare: on
        disk they may be of another type."""
        totals: dict[Tier, int] = {"gpu": 0, "cpu": 0, "disk": 0}
        for part in self.own_parts():
            totals[part.tier] += part.num_bytes
        for form, count in self.counted():
            for part in form.parts:
                totals[part.tier] += count * part.num_bytes
        return totals

    def _held_bytes(self) -> dict[Tier, int]:
        held: dict[Tier, int] = {"gpu": 0, "cpu": 0, "disk": 0}
        own = self.own_parts()
        near = [part for part in own if part.tier == self.compute_tier]
        stretches = [(near, 1), *((form.resident, count) for form, count in self.counted())]
        for parts, count in stretches:
            size = sum(align_up(p.num_bytes, _ALIGNMENT) for p in parts)
            held[self.compute_tier] += count * align_up(size, BLOCK)
        if self.compute_tier == "gpu":
            size = sum(align_up(p.num_bytes, _ALIGNMENT) for p in own if p.tier == "cpu")
            held["cpu"] = align_up(size, BLOCK)
            held["cpu"] += sum(n * align_up(form.host_bytes, BLOCK) for form, n in self.counted())
        return held

    def own_parts(self) -> list[Part]:
        """Those of tables that are nothing else."""
        return [part for table in self.tables if not table.is_head for part in table.parts]

    def _compressed(self) -> dict[str, Compressed]:
        parts = [part for table in self.tables for part in table.parts]
        parts += [part for form in (self.entrance, *self.forms) for part in form.parts]
        return {part.weight.name: part.compressed for part in parts if part.compressed}

    @property
    def decoded_bytes(self) -> int:
        return max((form.decoded_bytes for form in self.forms), default=0)

    @property
    def seam_bytes(self) -> int:
        """What lies behind the end of the ring that units stream through: room for rows that begin
        before it, and are whole where they began."""
        own = (streamed.granule_bytes for form in self.forms for streamed in form.streamed)
        return align_up(max(own, default=0), BLOCK)

    def streamed_bytes(self, tier: Tier) -> tuple[int, int]:
        """Bytes that one sweep brings from ``tier``: (wanted, moved with alignment)."""
        wanted = moved = 0
        for form, count in self.counted():
            own_wanted, own_moved = form.streamed_bytes(tier)
            wanted += count * own_wanted
            moved += count * own_moved
        return wanted, moved


def lay_out(
    programme: Programme,
    sources: Mapping[str, TensorSource],
    policy: Policy,
    *,
    dtype: str,
    tied_embeddings: bool,
    found: Forms | None = None,
) -> WeightLayout:
    """Place every weight by ``policy.weights``; the compute dtype is ``dtype``. ``found`` are the
    forms of the units, where they are known already."""

    def lay_out_unit(unit: Unit) -> UnitLayout:
        return _lay_out_unit(unit, sources, policy, dtype)

    forms, form_of = found or find_forms(programme, sources)
    # Stages of a pipeline have the table or the head.
    tied_embeddings = tied_embeddings and not (programme.receives or programme.sends)
    looked_up, split = programme.embedding.tables, policy.embedding or policy.weights
    tables = [Table(weight=w, parts=tuple(_split([w], split, sources, dtype))) for w in looked_up]
    if tied_embeddings:
        heads = [unit for unit in programme.units if unit.kind == "head"]
        parts = (part for unit in heads for part in lay_out_unit(unit).parts)
        own = tuple(part for part in parts if part.weight.name == "head.weight")
        if own:  # what a readout has in place of a head is no table
            tables[0] = Table(weight=looked_up[0], parts=own, is_head=True)
    beside = [weight for weight in programme.embedding.weights if weight not in looked_up]
    return WeightLayout(
        programme=programme,
        entrance=_stay(programme.embedding, beside, policy.compute_tier, sources, dtype),
        forms=tuple(map(lay_out_unit, forms)),
        form_of=form_of,
        tables=tuple(tables),
        compute_tier=policy.compute_tier,
        element_bytes=DTYPE_BYTES[dtype],
        lay_out_unit=lay_out_unit,
    )


def _stay(
    unit: Unit,
    weights: Sequence[Weight],
    tier: Tier,
    sources: Mapping[str, TensorSource],
    dtype: str,
) -> UnitLayout:
    """The layout of weights that all stay on the compute tier: those that products use as they are
    elsewhere, others plain."""
    near = Split(gpu=1.0) if tier == "gpu" else Split(cpu=1.0)
    products = {step.weight for step in unit.steps if isinstance(step, Project)}
    parts: list[Part] = []
    for w in weights:
        if w in products:
            parts += _split([w], near, sources, dtype)
        else:
            parts.append(Part(weight=w, first_row=0, num_rows=w.num_rows, tier=tier, dtype=dtype))
    return UnitLayout(
        unit=unit,
        resident=tuple(parts),
        streamed=(),
        stretches=(),
        piece_bytes=BLOCK,
        slot_bytes=0,
        host_bytes=0,
        decoded_bytes=0,
    )


def _split(
    weights: Sequence[Weight], split: Split, sources: Mapping[str, TensorSource], dtype: str
) -> list[Part]:
    """Cut the weights, one after the other, at the split's borders, which fall between granules of
    rows."""
    total = sum(weight.num_elements for weight in weights)
    borders = [("gpu", total * split.gpu), ("cpu", total * (split.gpu + split.cpu))]
    parts: list[Part] = []
    before = 0
    for weight in weights:
        first = 0
        own = sources[weight.name].dtype if weight.name in sources else dtype
        stays = is_widened(own, dtype) or find_compressed(own) is not None
        held = own if stays else dtype
        granule = granule_rows(weight.num_rows, held)
        for tier, border in (*borders, ("disk", float(total))):
            rows = (border - before) / weight.num_columns
            last = granule * round(rows / granule)
            if tier == "disk" or rows > weight.num_rows - 0.5:  # the end is no multiple
                last = weight.num_rows
            last = min(max(last, first), weight.num_rows)
            if last > first:
                count = last - first
                parts.append(
                    Part(weight=weight, first_row=first, num_rows=count, tier=tier, dtype=held)  # type: ignore[arg-type]
                )
            first = last
        before += weight.num_elements
    return parts


def _lay_out_unit(
    unit: Unit, sources: Mapping[str, TensorSource], policy: Policy, dtype: str
) -> UnitLayout:
    # Vectors are small and needed by every token: they stay on the compute tier.
    vectors = [weight for weight in unit.weights if not weight.is_matrix]
    matrices = in_file_order(unit, sources)
    tier = policy.compute_tier
    parts = [
        Part(weight=v, first_row=0, num_rows=1, tier=tier, dtype="float32" if v.is_wide else dtype)
        for v in vectors
    ]
    parts += _split(matrices, policy.weights, sources, dtype)
    slot = _SlotBuilder(offset=0, streamed=[], stretches=[], is_read_into=tier == "cpu")
    slot.add_disk([p for p in parts if p.tier == "disk"], sources)
    host = [p for p in parts if p.tier == "cpu" and tier != "cpu"]
    host_bytes = slot.add_host(host)
    foreign = [s.part for s in slot.streamed if s.is_foreign]
    return UnitLayout(
        unit=unit,
        resident=tuple(p for p in parts if p.tier == tier),
        streamed=tuple(slot.streamed),
        stretches=tuple(slot.stretches),
        piece_bytes=policy.piece_bytes,
        slot_bytes=align_up(slot.offset, BLOCK),
        host_bytes=host_bytes,
        decoded_bytes=sum(align_up(part.num_bytes, _ALIGNMENT) for part in foreign),
    )


@dataclass(kw_only=True, slots=True)
class _SlotBuilder:
    """A slot being filled; ``offset`` is where it ends so far. Where it ``is_read_into`` a file's
    blocks lie as they do there; a device gets them from RAM, to where its products are fast."""

    offset: int
    is_read_into: bool
    streamed: list[SlotPart]
    stretches: list[Stretch]

    def add_host(self, parts: Sequence[Part]) -> int:
        """Append the cpu tier's parts, one stretch; returns its length."""
        base = align_up(self.offset, BLOCK)
        length = 0
        for part in parts:
            place = base + length
            self.streamed.append(SlotPart(part=part, slot_offset=place, dtype=part.dtype))
            length += align_up(part.num_bytes, _ALIGNMENT)
        if length:
            self.add(None, 0, length, base, ((0, length),))
        return length

    def add_disk(self, parts: Sequence[Part], sources: Mapping[str, TensorSource]) -> None:
        """Append the disk tier's parts; neighbours in a file (one block apart at most) together."""
        run: list[tuple[Part, TensorSource]] = []
        for part in parts:
            weight = part.weight
            source = sources[weight.name].rows(weight.first_row + part.first_row, part.num_rows)
            if run:
                last = run[-1][1]
                gap = source.offset - (last.offset + last.num_bytes)
                if last.path != source.path or not 0 <= gap <= BLOCK:
                    self.add_run(run)
                    run = []
            run.append((part, source))
        if run:
            self.add_run(run)

    def add_run(self, run: Sequence[tuple[Part, TensorSource]]) -> None:
        """Append tensors that lie one after the other in a file."""
        begin = align_down(run[0][1].offset, BLOCK)
        end = align_up(run[-1][1].offset + run[-1][1].num_bytes, BLOCK)
        base = self.offset
        if not self.is_read_into:
            base += -(base + run[0][1].offset - begin) % _ALIGNMENT
        for part, source in run:
            place = base + source.offset - begin
            self.streamed.append(SlotPart(part=part, slot_offset=place, dtype=source.dtype))
        wanted = tuple((source.offset, source.num_bytes) for _, source in run)
        self.add(run[0][1].path, begin, end - begin, base, wanted)

    def add(
        self,
        path: Path | None,
        offset: int,
        num_bytes: int,
        slot_offset: int,
        wanted: tuple[tuple[int, int], ...],
    ) -> None:
        self.stretches.append(
            Stretch(
                path=path,
                offset=offset,
                num_bytes=num_bytes,
                slot_offset=slot_offset,
                wanted=wanted,
            )
        )
        self.offset = slot_offset + num_bytes
