"""Bytes that cross each link in a run, from plan and tokens alone.

Of rows of one length in blocks it is known beforehand who is in which sweep; of others that is
noted while they run, and so is which experts were chosen. Weights by the layout's bytes per sweep;
keys, values and activations by row lengths, pages and shares; embedding rows by the tokens.
Reckoned apart from what moves them, so that a run's counts can be held against it. Knows the policy
and no schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from freight.memory.disk import BLOCK
from freight.model.batch import MicroBatch, first_page
from freight.model.decoder import build_programme
from freight.model.sources import TensorSource
from freight.plan.expected_experts import ExpectedExperts
from freight.plan.layout import Table, UnitLayout
from freight.plan.operation import Operation
from freight.plan.policy import Split, Tier
from freight.plan.ring import stream_model
from freight.plan.sweep import Awaited, Sweep
from freight.quantities import align_down, align_up
from freight.runtime.engine import Engine
from freight.runtime.loaders import BOUNCE_BYTES

__all__ = ["SweepLog", "expected_bytes", "logged_bytes"]

_JOIN_BYTES = 32 * 1024
"""Embedding rows on disk that are no further apart come with one read."""

_SOURCES: Final[tuple[Tier, Tier]] = ("disk", "cpu")

_State = tuple[int, Sequence[int], int]
"""A row in a sweep: its keys so far, the tokens it brings, and for how many the last sweep wrote
keys, where some of them do not count."""

_Way = tuple[str, str, bool]
"""The tier that a row's keys are on before a sweep, and after it; and whether the CPU attends it
when it brings its next token."""


class SweepLog:
    """Who was in which sweep, with what, and on which tier; and which experts were chosen."""

    def __init__(self, engine: Engine) -> None:
        self._near = engine.plan.policy.compute_tier
        self._rows = engine.placement.kv_cache.rows
        self._routers = sum(unit.unit.kind == "router" for unit in engine.plan.layout.units)
        self._chosen: list[Collection[int]] = []
        self.sweeps: dict[int, list[tuple[list[_State], Sequence[_Way]]]] = {}
        self.tokens: dict[int, tuple[int, int]] = {}
        """Of each sweep, and how many of them the head needs."""
        if self.has_experts:
            self._listen(engine)

    @property
    def has_experts(self) -> bool:
        return self._routers > 0

    def _listen(self, engine: Engine) -> None:
        """Note what routers say when they are asked: layer by layer each micro-batch's once."""
        stream = engine._stream

        def listening(
            sweeps: Iterator[Sweep | Awaited],
            expects_more: Callable[[], bool],
            chosen: Callable[[int], Collection[int]],
        ) -> Iterator[Operation]:
            def noted(k: int) -> Collection[int]:
                self._chosen.append(chosen(k))
                return self._chosen[-1]

            return stream(sweeps, expects_more, noted)

        engine._stream = listening  # type: ignore[method-assign]

    def chosen(self) -> Iterator[list[list[Collection[int]]]]:
        """For each sweep, by router, the experts of each of its micro-batches."""
        said = iter(self._chosen)
        for _, batches in sorted(self.sweeps.items()):
            yield [[next(said) for _ in batches] for _ in range(self._routers)]
        assert next(said, None) is None, "routers were asked more often than there are batches"

    def on_batch(self, sweep: int, batch: MicroBatch) -> None:
        states = [
            (span.kv_len, batch.token_ids[span.start : span.end], span.written_len)
            for span in batch.rows
        ]
        pages = [self._rows[span.row] for span in batch.rows]
        ways = [
            (
                self._tier((own.origin or own).home),
                self._tier(own.home),
                own.is_delegated and own.origin is None and span.is_single,
            )
            for own, span in zip(pages, batch.rows, strict=True)
        ]
        self.sweeps.setdefault(sweep, []).append((states, ways))
        before, picked = self.tokens.get(sweep, (0, 0))
        self.tokens[sweep] = before + batch.num_tokens, picked + batch.num_picked

    def _tier(self, home: str) -> str:
        return self._near if home == "compute" else home


def logged_bytes(engine: Engine, log: SweepLog) -> dict[str, int]:
    """Bytes by link, of the sweeps that were noted."""
    form = _ClosedForm(engine)
    for (sweep, batches), chosen in zip(sorted(log.sweeps.items()), log.chosen(), strict=True):
        coming = form.coming(chosen, log.tokens[sweep])
        form.add_weights(coming)
        for number, (rows, ways) in enumerate(batches):
            groups = form.num_groups(coming, chosen, number)
            form.add_batch(rows, ways, groups)
    return {link: size for link, size in form.moved.items() if size}


def expected_bytes(
    engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> dict[str, int]:
    """Bytes by link, for rows that ran in this order and whose answers are equally long, through a
    model without experts: which of these come is known only afterwards."""
    form = _ClosedForm(engine)
    for sweep in _sweeps(engine, prompts, answers):
        form.add_weights([])
        for rows in sweep:
            form.add_batch(rows, form.ways_of(len(rows)), 0)
    return {link: size for link, size in form.moved.items() if size}


def _sweeps(
    engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Iterator[list[list[_State]]]:
    """Micro-batches of each sweep: blocks in order, every row in all sweeps of its block."""
    policy = engine.plan.policy
    size, block = policy.micro_batch_size, policy.block_rows
    for begin in range(0, len(prompts), block):
        members = range(begin, min(begin + block, len(prompts)))
        for step in range(len(answers[0])):
            states = [_state(prompts[row], answers[row], step) for row in members]
            yield [states[i : i + size] for i in range(0, len(states), size)]


def _state(prompt: Sequence[int], answer: Sequence[int], step: int) -> _State:
    return (len(prompt) + step - 1, answer[step - 1 : step], 0) if step else (0, prompt, 0)


class _ClosedForm:
    def __init__(self, engine: Engine) -> None:
        self._plan = engine.plan
        self._config = engine.config
        self._on_device = engine.plan.policy.compute_tier == "gpu"
        element_bytes = engine.plan.layout.element_bytes
        self._stream_bytes = build_programme(engine.config).stream_columns * element_bytes
        layers = sum(unit.unit.kind == "attention" for unit in engine.plan.layout.units)
        config = engine.config
        self._attended_bytes = layers * config.attended_bytes_per_token(element_bytes)
        self._new_key_bytes = layers * config.kv_bytes_per_token_per_layer(element_bytes)
        self._model = stream_model(engine.plan.layout, engine.plan.policy)
        self._expected = ExpectedExperts(model=self._model)
        self._weights: Counter[str] = Counter()
        self._experts: list[dict[int, dict[str, int]]] = []
        for unit in engine.plan.layout.units:
            if unit.unit.expert is not None:
                self._experts[-1][unit.unit.expert] = self._bytes_of(unit)
                continue
            self._weights.update(self._bytes_of(unit))
            if unit.unit.kind == "router":  # its experts follow
                self._experts.append({})
        sources = engine.placement.files.sources
        self._tables = [
            _LookedUp(table=own, source=sources[own.weight.name])
            for own in engine.plan.layout.tables
        ]
        self.moved: Counter[str] = Counter()

    def coming(
        self, chosen: Sequence[Sequence[Collection[int]]], tokens: tuple[int, int]
    ) -> list[Collection[int]]:
        """By router the experts that come in the next sweep, whose micro-batches have ``chosen``
        some."""
        found = []
        for layer, own in zip(self._model.experts, chosen, strict=True):
            needed = frozenset[int]().union(*own)
            found.append(self._expected.of(layer, *tokens) or needed)
            self._expected.learn(layer, *tokens, len(needed))
        return found

    def num_groups(
        self,
        coming: Sequence[Collection[int]],
        chosen: Sequence[Sequence[Collection[int]]],
        number: int,
    ) -> int:
        """How many groups of experts a micro-batch passes that is so many in its sweep, until what
        the head needs is picked."""
        found = 0
        for (layer, units), own, some in zip(
            self._model.experts.items(), coming, chosen, strict=True
        ):
            if units[0] >= self._model.picks_at:
                continue
            for group in self._model.groups(layer, own):
                experts = {self._model.units[unit].expert for unit in group}
                wanted = [not experts.isdisjoint(each) for each in some]
                found += wanted[number] or (number == 0 and not any(wanted))
        return found

    def add_weights(self, coming: Sequence[Collection[int]]) -> None:
        """Those of one sweep, with the experts that come, by router."""
        self.moved.update(self._weights)
        for layer, experts in zip(self._experts, coming, strict=True):
            for expert in experts:
                self.moved.update(layer[expert])

    def _bytes_of(self, unit: UnitLayout) -> dict[str, int]:
        """Reads in whole blocks, but for a file's last block: it is read as far as it goes."""
        from_disk, from_host = (unit.streamed_bytes(tier)[1] for tier in _SOURCES)
        missing = 0
        for piece in unit.pieces:
            if piece.path is not None:
                end = piece.path.stat().st_size
                missing += max(0, piece.offset + piece.num_bytes - end)
        over_link = (from_disk + from_host) * self._on_device
        return {"disk read": from_disk - missing, "host to device": over_link}

    def add_batch(self, rows: Sequence[_State], ways: Sequence[_Way], groups: int) -> None:
        """A micro-batch in a sweep, with the tiers of each row's keys; of experts it passes so many
        ``groups``."""
        self.add_kv(rows, ways)
        is_begun = any(
            is_attended and _is_next(state)
            for state, (_, _, is_attended) in zip(rows, ways, strict=True)
        )
        self.add_activations(sum(len(ids) for _, ids, _ in rows), groups, is_begun=is_begun)
        self.add_embedding([token for _, ids, _ in rows for token in ids])

    def ways_of(self, num_rows: int) -> list[_Way]:
        """Of the rows of a micro-batch, all equally long: they stay where they are."""
        return [
            (tier, tier, is_attended)
            for tier, is_attended, count in self._plan.policy.homes(num_rows)
            for _ in range(count)
        ]

    def add_kv(self, rows: Sequence[_State], ways: Sequence[_Way]) -> None:
        """Pages of offloaded rows: all they had comes, all that were touched go, or of rows that
        move all, and all of what they keep in layers without keys. Of those that the CPU attends
        queries and new keys go, and what it finds comes."""
        states = self._plan.geometry.state_bytes * self._config.num_recurrent_layers
        near = self._plan.policy.compute_tier
        for state, (source, target, is_attended) in zip(rows, ways, strict=True):
            old = states if state[0] else 0
            into, back, full, filled = self._pages(state, stays=source == target)
            if is_attended and _is_next(state):
                into, back = self._attended_bytes, self._attended_bytes + self._new_key_bytes
            if source != near:
                self.moved["host to device"] += (into + old) * self._on_device
            if target != near:
                self.moved["device to host"] += (back + states) * self._on_device
            if source == "disk":
                self.moved["disk read"] += full + old
            if target == "disk":
                self.moved["disk write"] += filled + states

    def _pages(self, state: _State, *, stays: bool) -> tuple[int, int, int, int]:
        """Bytes of a row's pages of all layers that come and that go, and of each those that are on
        disk where it is: full ones. In layers that keep a window of keys these are the pages that
        it reaches, and of those that go the last."""
        before, ids, written = state
        page, windows = self._plan.policy.page_tokens, self._plan.geometry.windows
        after, pages = before + len(ids), -(-before // page)
        full, last = min(pages, max(before, written) // page), -(-after // page)
        rolled = windows.layers * self._plan.geometry.page_bytes
        whole = sum(self._plan.geometry.far_page_bytes) - rolled
        first = first_page(before, page, windows.tokens) if rolled else 0
        kept = before // page if stays else 0
        touched = max(before // page if stays else first, last - windows.pages)
        return (
            pages * whole + (pages - first) * rolled,
            (last - kept) * whole + (last - touched) * rolled,
            full * whole + (full - first) * rolled,
            (after // page - kept) * whole + (after // page - touched) * rolled,
        )

    def add_activations(self, num_tokens: int, groups: int, *, is_begun: bool) -> None:
        """Out and in again between any two units, until what the head needs is picked; in once more
        for attention that begins, and is finished when the CPU has attended."""
        kinds = [unit.unit.kind for unit in self._plan.layout.units]
        before = self._model.units[: self._model.picks_at]
        crossings = sum(unit.expert is None for unit in before) + groups
        on_gpu, on_cpu = _cut(num_tokens, self._plan.policy.activations)
        on_disk = num_tokens - on_gpu - on_cpu
        again = crossings + kinds.count("attention") * is_begun
        disk = align_up(on_disk * self._stream_bytes, BLOCK)
        host = on_cpu * self._stream_bytes
        self.moved["disk read"] += disk * again
        self.moved["disk write"] += disk * crossings
        self.moved["host to device"] += (host + disk) * again * self._on_device
        self.moved["device to host"] += (host + disk) * crossings * self._on_device

    def add_embedding(self, token_ids: Sequence[int]) -> None:
        """Rows that are not where the arithmetic is; from disk, near neighbours together."""
        near, element_bytes = self._plan.policy.compute_tier, self._plan.layout.element_bytes
        for own in self._tables:
            num_far, read_bytes = own.moved(token_ids, near)
            row_bytes = own.table.weight.num_columns * element_bytes
            self.moved["host to device"] += num_far * row_bytes * self._on_device
            self.moved["disk read"] += read_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _LookedUp:
    """A table whose rows are looked up by token."""

    table: Table
    source: TensorSource

    def moved(self, token_ids: Sequence[int], near: str) -> tuple[int, int]:
        """How many rows are not near, and the bytes of reads of those on disk."""
        tiers = {token: self._tier(token) for token in set(token_ids)}
        num_far = sum(tiers[token] != near for token in token_ids)
        size = self.source.num_bytes // self.source.shape[0]
        most = max(1, (BOUNCE_BYTES - 2 * BLOCK) // size)
        stretches: list[list[int]] = []
        for token in sorted(token for token, tier in tiers.items() if tier == "disk"):
            begin, end = stretches[-1] if stretches else (token, token)
            if stretches and (token - end) * size <= _JOIN_BYTES and token - begin < most:
                stretches[-1][1] = token
            else:
                stretches.append([token, token])
        reads = (self._read_bytes(first * size, (last + 1) * size) for first, last in stretches)
        return num_far, sum(reads)

    def _tier(self, token: int) -> str:
        for part in self.table.parts:
            first = part.weight.first_row + part.first_row
            if first <= token < first + part.num_rows:
                return part.tier
        raise AssertionError(f"token {token} is in no part of the table")

    def _read_bytes(self, begin: int, end: int) -> int:
        """Whole blocks around these bytes of the table, as far as the file goes."""
        offset, file_bytes = self.source.offset, self.source.path.stat().st_size
        last = min(align_up(offset + end, BLOCK), file_bytes)
        return last - align_down(offset + begin, BLOCK)


def _is_next(state: _State) -> bool:
    """Whether it brings one token, behind others."""
    before, ids, _ = state
    return before > 0 and len(ids) == 1


def _cut(count: int, split: Split) -> tuple[int, int]:
    """How many of ``count`` come first (gpu), and second (cpu); the rest is on disk."""
    first = min(count, round(count * split.gpu))
    return first, min(count, round(count * (split.gpu + split.cpu))) - first
