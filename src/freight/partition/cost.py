"""What a model takes on a mesh of chips: seconds of a step, bytes of a chip, and what binds.

Prices the computations and moves of ``layers``, nothing else. Knows how chips are linked and how
well they are used; knows no search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from freight.errors import InputError
from freight.hardware.chip import Chip
from freight.model.decoder import count_parameters
from freight.model.switches import ModelConfig
from freight.partition.efficiency import DEFAULTS, Efficiency, Phase
from freight.partition.fabric import Fabric
from freight.partition.layers import Cut, block, embedding, layer_sizes, logits
from freight.partition.layout import Mesh
from freight.partition.padding import Padding, pad
from freight.partition.sharded import Compute, Sharded
from freight.partition.timing import moves_s

__all__ = ["Cost", "Line", "Setting", "Step", "parameters_of_token"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One pass over the model: ``rows`` of ``new_tokens`` each, after ``past`` ones in a cache."""

    phase: Phase
    rows: int
    new_tokens: int
    past: int = 0

    def __post_init__(self) -> None:
        if self.rows < 1 or self.new_tokens < 1 or self.past < 0:
            raise InputError(
                f"A step of {self.rows} rows, {self.new_tokens} new tokens after {self.past} was "
                "described.",
                "It has one row and one new token at least, after none or more.",
                "Raise what is below that.",
            )

    @property
    def num_tokens(self) -> int:
        return self.rows * self.new_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Chips, and how numbers are kept. ``weight_bytes`` is that of a matrix's element with its
    share of scales; activations are computed with in ``activation_bytes``. ``usable`` is the share
    of memory that a plan may fill. ``efficiencies`` are by whether weights are gathered, and
    phase."""

    chip: Chip
    weight_bytes: float = 2.0
    activation_bytes: float = 2.0
    kv_bytes: float = 2.0
    usable: float = 0.95
    efficiencies: Mapping[tuple[bool, Phase], Efficiency] = field(default_factory=lambda: DEFAULTS)

    def efficiency(self, is_gathered: bool, step: Step, num_chips: int) -> Efficiency:
        """Of a step of so many tokens on so many chips."""
        return self.efficiencies[is_gathered, step.phase].at(step.num_tokens / num_chips)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A computation or a move of one layer: what it is, how the value lies, what moves and how
    long it takes. ``waited_s`` is what is left of a move that is overlapped."""

    what: str
    layout: str
    num_bytes: float
    seconds: float
    waited_s: float


@dataclass(frozen=True)
class Cost:
    """Of one step with one cut. Raises InputError where something cannot be cut as asked.

    ``ways`` are layers that were found by search, one for each form of ``forms``, instead of the
    cut's; ends and stored weights are those of the cut all the same."""

    config: ModelConfig
    mesh: Mesh
    cut: Cut
    step: Step
    setting: Setting
    ways: tuple[Sharded, ...] = ()

    @cached_property
    def padding(self) -> Padding:
        return pad(self.config, self.mesh, self.cut)

    @cached_property
    def efficiency(self) -> Efficiency:
        return self.setting.efficiency(bool(self.cut.gathered), self.step, self.mesh.num_chips)

    @cached_property
    def fabric(self) -> Fabric:
        return Fabric.of(self.setting.chip, self.mesh)

    @cached_property
    def forms(self) -> Mapping[tuple[bool, int | None], int]:
        """How many layers there are by whether they have experts, and by their windows."""
        config = self.config
        return Counter(
            (config.has_experts(layer), config.sliding_windows[layer])
            for layer in range(config.num_layers)
        )

    @cached_property
    def layers(self) -> tuple[tuple[Sharded, int], ...]:
        """Layers of each form, and how many there are."""
        ways = self.ways or tuple(
            block(
                self.mesh,
                self.sizes(window, with_experts=has_experts),
                self.cut,
                self.config,
                with_experts=has_experts,
            )
            for has_experts, window in self.forms
        )
        return tuple(zip(ways, self.forms.values(), strict=True))

    @cached_property
    def ends(self) -> tuple[Sharded, ...]:
        """The embedding, and logits of one token per row."""
        sizes = self.sizes(None)
        last = {**sizes, "L": 1}
        centred = self.config.has_centred_norms
        head = logits(self.mesh, last, self.cut, centred=centred)
        return embedding(self.mesh, sizes, self.cut), head

    def sizes(self, window: int | None, *, with_experts: bool = True) -> dict[str, float]:
        """Of all dims, heads padded, with keys as far as a window reaches; an MLP in a layer
        without experts is as wide as it is."""
        step = self.step
        sizes = layer_sizes(
            self.padding.config, rows=step.rows, new_tokens=step.new_tokens, past=step.past
        )
        if not with_experts:
            sizes["F"] = self.padding.config.intermediate_size
        if window is not None:
            sizes["S"], sizes["A"] = min(sizes["S"], window), min(sizes["A"], window)
        return sizes

    @cached_property
    def compute_s(self) -> float:
        """Arithmetic of all layers and ends, per chip, at the chip's peak."""
        flops = sum(own.flops * count for own, count in self._all())
        return flops / self.setting.chip.dense_flops

    @cached_property
    def memory_s(self) -> float:
        """Reading weights and cache, at the peak."""
        weights = sum(self._read_elements(own) * count for own, count in self.layers)
        weights += self.ends[1].used_elements
        read = weights * self.setting.weight_bytes + self.kv_bytes
        return read / self.setting.chip.memory_bytes_per_s

    def _read_elements(self, own: Sharded) -> float:
        """Weights of a layer that a chip reads: of experts those that its tokens are likely to
        choose, if they choose alike."""
        experts = self.config.experts
        if experts is None or "experts in" not in own.weights:
            return own.used_elements
        apart = "".join(axis for axis in self.cut.rows if axis not in self.cut.experts)
        tokens = self.step.num_tokens / self.mesh.size(apart)
        chosen: float = 1 - (1 - experts.per_token / experts.num_experts) ** tokens
        of_experts = sum(
            own.used[name].elements(own.sizes, self.mesh) for name in ("experts in", "experts out")
        )
        return own.used_elements - (1 - chosen) * of_experts

    @cached_property
    def link_s(self) -> float:
        """All moves, none of them overlapped, at the peak."""
        return sum(self._moves_s(own) * count for own, count in self._all())

    @cached_property
    def waited_s(self) -> float:
        """What is waited for of the moves, at the rates that are reached."""
        return self._waited_at(self.efficiency)

    @cached_property
    def seconds(self) -> float:
        return self._seconds_at(self.efficiency)

    @cached_property
    def even_seconds(self) -> float:
        """With the efficiencies of stationary weights whatever is gathered: cuts are compared by
        this. Where both were measured, it was at batches of different size, of which they say more.
        """
        return self._seconds_at(self.setting.efficiency(False, self.step, self.mesh.num_chips))

    def _seconds_at(self, rates: Efficiency) -> float:
        fixed = rates.layer_s * self.config.num_layers
        arithmetic = self.compute_s / rates.compute + self.memory_s / rates.memory
        return arithmetic + self._waited_at(rates) + fixed

    def _waited_at(self, rates: Efficiency) -> float:
        if not rates.overlap:
            return self.link_s / rates.link
        return sum(
            line.waited_s * count for own, count in self._all() for line in self._lines(own, rates)
        )

    @property
    def binds(self) -> str:
        """What takes longest."""
        own = self.efficiency
        parts = {
            "compute": self.compute_s / own.compute,
            "memory": self.memory_s / own.memory,
            "links": self.waited_s,
            "fixed time of layers": own.layer_s * self.config.num_layers,
        }
        return max(parts, key=lambda name: parts[name])

    @property
    def mfu(self) -> float:
        """Model FLOPs, two per parameter that a token meets, over what the chips could have done:
        padding and attention's core count nothing (Pope et al., section 2)."""
        done = 2.0 * parameters_of_token(self.config) * self.step.num_tokens
        peak = self.mesh.num_chips * self.setting.chip.dense_flops
        return done / (peak * self.seconds)

    @property
    def chip_seconds_per_token(self) -> float:
        return self.mesh.num_chips * self.seconds / self.step.num_tokens

    @property
    def dollars_per_token(self) -> float | None:
        price = self.setting.chip.dollars_per_hour
        return None if price is None else self.chip_seconds_per_token * price / 3600

    @cached_property
    def weight_bytes(self) -> float:
        """Weights that a chip keeps."""
        elements = sum(own.stored_elements * count for own, count in self.layers)
        elements += sum(own.stored_elements for own in self._distinct_ends())
        return elements * self.setting.weight_bytes

    def _distinct_ends(self) -> tuple[Sharded, ...]:
        return self.ends[:1] if self.config.tied_embeddings else self.ends

    @cached_property
    def kv_bytes(self) -> float:
        """Keys and values of a chip, all of which a step reads."""
        return sum(self._kept(own) * own.sizes["S"] * count for own, count in self.layers)

    def _kept(self, own: Sharded) -> float:
        """Bytes of keys and values of a chip and layer for one token of each row."""
        keys = own.outputs["keys"]
        return keys.elements({**own.sizes, "L": 1}, self.mesh) * self.setting.kv_bytes

    @cached_property
    def working_bytes(self) -> float:
        """What else a step needs at once: one gathered matrix, the pieces of the next coming as
        those of the last are left, and the widest of its values."""
        gathered = max(self._gathered(own) for own, _ in self.layers)
        widest = max(
            step.out_layout.elements(own.sizes, self.mesh)
            for own, _ in self.layers
            for step in own.computes
        )
        setting = self.setting
        return gathered * setting.weight_bytes + widest * setting.activation_bytes

    def _gathered(self, own: Sharded) -> float:
        """Elements of the largest matrix that a layer gathers."""
        pairs = [(own.used[name], layout) for name, layout in own.weights.items()]
        return max(
            used.elements(own.sizes, self.mesh) if used != stored else 0.0 for used, stored in pairs
        )

    @property
    def memory_bytes(self) -> float:
        """Of a chip, in all."""
        return self.weight_bytes + self.kv_bytes + self.working_bytes

    @property
    def room_bytes(self) -> float:
        """What a plan may use of a chip."""
        return self.setting.usable * self.setting.chip.memory_bytes

    def max_context(self, kv_bytes: float | None = None) -> int:
        """The most tokens per row for which keys and values fit: into what weights and the rest
        leave, or into ``kv_bytes`` of a chip. Windows are not counted on."""
        per_token = sum(self._kept(own) * count for own, count in self.layers)
        free = self.room_bytes - self.weight_bytes - self.working_bytes
        return max(0, int((free if kv_bytes is None else kv_bytes) // per_token))

    def lines(self) -> Iterator[tuple[str, int, tuple[Line, ...]]]:
        """Of one layer of each form and of the ends: a name, how many there are, what is done."""
        for own, count in self.layers:
            yield "layer", count, tuple(self._lines(own, self.efficiency))
        for name, end in zip(("embedding", "logits"), self.ends, strict=True):
            yield name, 1, tuple(self._lines(end, self.efficiency))

    def _all(self) -> Iterator[tuple[Sharded, int]]:
        yield from self.layers
        yield from ((own, 1) for own in self.ends)

    def _moves_s(self, own: Sharded) -> float:
        return sum(seconds for _, seconds in self._moves(own))

    def _moves(self, own: Sharded) -> Iterator[tuple[float, float]]:
        """Bytes that a chip sends and the time at the peak, of each move."""
        setting = self.setting
        return moves_s(own, self.fabric, setting.activation_bytes, setting.weight_bytes)

    def _lines(self, own: Sharded, rates: Efficiency) -> Iterator[Line]:
        chip = self.setting.chip
        moves = self._moves(own)
        products = [step for step in own.computes if step.kind == "product"]
        for step in own.steps:
            if isinstance(step, Compute):
                seconds = step.flops / chip.dense_flops / rates.compute
                yield Line(
                    what=f"{step.kind} to {step.out}" if step.kind != "norm" else "norm",
                    layout=str(step.out_layout),
                    num_bytes=0.0,
                    seconds=seconds,
                    waited_s=0.0,
                )
                continue
            num_bytes, at_peak = next(moves)
            seconds = at_peak / rates.link
            beside = sum(
                product.flops / chip.dense_flops / rates.compute
                for product in products
                if step.value in (*product.operands, product.out)
            )
            yield Line(
                what=f"{step.move} of {step.value}",
                layout=f"{step.before} -> {step.after}",
                num_bytes=num_bytes,
                seconds=seconds,
                waited_s=seconds - min(rates.overlap * seconds, beside),
            )


@cache
def parameters_of_token(config: ModelConfig) -> int:
    """Those that a token is computed with: of each layer's experts the ones that it chooses."""
    experts = config.experts
    if experts is None:
        return count_parameters(config)
    left_out = experts.num_experts - experts.per_token
    chosen = replace(config, experts=replace(experts, num_experts=experts.per_token))
    routed = sum(config.has_experts(layer) for layer in range(config.num_layers))
    return count_parameters(chosen) + routed * left_out * config.hidden_size  # routers are whole
