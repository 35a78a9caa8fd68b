"""Schemes over one axis: the paper's come out under its restrictions, better ones without them."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest

from freight.errors import InputError
from freight.model.config import ModelConfig, read_config
from freight.partition import scheme_search
from freight.partition.layers import layer_sizes
from freight.partition.layout import Mesh
from freight.partition.named import DYNAMIC, EXCHANGED, dynamic_form, dynamic_layer
from freight.partition.scheme_search import find_schemes
from freight.partition.schemes import LITERAL, PAPER, Polynomial, Rules, Scheme
from freight.partition.switching import Rates, fastest, layer_seconds

LLAMAS = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
WIDER = replace(PAPER, core_by_heads=False, all_to_all=True, gathered_keys=True)


def bundled(name: str) -> ModelConfig:
    file = resources.files("freight.model") / "configs" / f"{name}.json"
    with resources.as_file(file) as path:
        return read_config(path)


def figures(scheme: Scheme) -> tuple[float, ...]:
    return (*scheme.costs, scheme.num_collectives)


def test_the_eight_rules_alone_give_fifty_five() -> None:
    schemes = find_schemes(bundled("llama-2-7b"), 4, LITERAL)
    assert len(schemes) == 55
    for one in schemes:
        assert not any(other.beats(one) for other in schemes)


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_with_the_restrictions_there_are_the_papers_three(name: str, p: int) -> None:
    """Section "Pareto Optimal Partitioning Schemes": three, as the executed layers cost them."""
    model = bundled(name)
    found = find_schemes(model, p, PAPER)
    sizes = layer_sizes(model, rows=1, new_tokens=64)
    wanted = []
    for own in (dynamic_layer(Mesh.of(x=p), sizes, scheme) for scheme in DYNAMIC.values()):
        products = sum(step.flops for step in own.computes if step.kind == "product")
        moved = own.moved(weights=False), own.moved(weights=True)
        wanted.append((products, *moved, own.stored_elements))
    core = 2.0 / p * model.num_heads * model.head_dim
    got = [(s.flops.linear * 64, s.moved.at(64), s.gathered.constant, s.weights) for s in found]
    assert all(scheme.flops.quadratic == pytest.approx(core) for scheme in found)
    assert np.allclose(sorted(got), sorted(wanted), rtol=1e-12)


def test_their_polynomials_are_the_tables() -> None:
    model = bundled("llama-2-7b")
    h, f, p = model.hidden_size, model.intermediate_size, 4
    found = find_schemes(model, p, PAPER)
    for scheme, own in zip(DYNAMIC.values(), found, strict=True):
        form = dynamic_form(scheme, s=1000, h=h, f=f, p=p)
        assert own.flops.linear * 1000 == pytest.approx(form.flops)
        assert own.moved.at(1000) + own.gathered.constant == pytest.approx(form.moved)
        assert own.weights == pytest.approx(form.weights)
    terms = [{**own.terms("moved"), **own.terms("gathered")} for own in found]
    assert terms == [{"sh": 4 * 0.75}, {"sh": 3 * 0.75}, {"sh": 2 * 0.75, "hf": 3 * 0.75}]
    assert found[0].terms("flops") == {"shh": 8 / p, "ssh": 2 / p, "shf": 6 / p}


@pytest.mark.parametrize("p", [2, 4, 8])
def test_each_restriction_is_needed_or_not(p: int) -> None:
    """By heads only changes nothing beside the other two for multi-head models; for grouped heads
    it does, for their keys are cheap to gather."""
    counts = {}
    for name in ("llama-2-7b", "llama-2-70b"):
        model = bundled(name)
        counts[name] = [
            len(find_schemes(model, p, rules))
            for rules in (
                replace(PAPER, core_by_heads=False),
                replace(PAPER, only_projection_whole=False),
                replace(PAPER, gathered_for_rows=False),
            )
        ]
    assert counts == {"llama-2-7b": [3, 8, 8], "llama-2-70b": [7, 8, 8]}


def test_better_ones_that_the_paper_missed() -> None:
    """With an exchange of heads for rows: (1 + 1/p) s h + 3 h f, the projection whole."""
    p = 4
    for name in ("llama-2-7b", "llama-2-70b"):
        model = bundled(name)
        paper, wider = (find_schemes(model, p, rules) for rules in (PAPER, WIDER))
        h, f = model.hidden_size, model.intermediate_size
        wanted = Polynomial(3.0 * h * f * 0.75, (1 + 1 / p) * h * 0.75)
        best = [own for own in wider if own.moved + own.gathered == wanted]
        assert best and best[0].flops == paper[0].flops
        assert best[0].weights == paper[1].weights
        assert not any(old.beats(own) for old in paper for own in wider)
        # They are layers that were run: test_named.
        sizes = layer_sizes(model, rows=1, new_tokens=64)
        for scheme in EXCHANGED.values():
            own = dynamic_layer(Mesh.of(x=p), sizes, scheme)
            moved = own.moved(weights=False), own.moved(weights=True)
            assert any(
                (s.moved.at(64), s.gathered.constant, s.weights)
                == pytest.approx((*moved, own.stored_elements))
                for s in wider
            )
    keys = [own for own in wider if "k" in "".join(own.terms("moved"))]
    least = min(own.moved.linear for own in wider)
    assert least == min(own.moved.linear for own in keys)
    assert least == 2 * 1024 * 0.75  # 2 s k, for k an eighth of h


def test_dropping_early_drops_nothing_that_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bundled("llama-2-70b")
    pruned = find_schemes(model, 4, PAPER)
    final = scheme_search._undominated
    followed = []

    def every(schemes: list[Scheme]) -> list[Scheme]:
        """All that differ in anything."""
        followed.append(len(schemes))
        return [*{(figures(own), own.moves): own for own in schemes}.values()]

    monkeypatch.setattr(scheme_search, "_undominated", every)
    found = final(find_schemes(model, 4, PAPER))
    assert max(followed) > 1000
    assert np.allclose(sorted(map(figures, found)), sorted(map(figures, pruned)), rtol=1e-12)


def test_what_does_not_divide_or_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="32 query heads"):
        find_schemes(bundled("llama-2-7b"), 5, PAPER)
    with pytest.raises(InputError, match="two chips at least"):
        find_schemes(bundled("llama-2-7b"), 1, PAPER)
    with pytest.raises(InputError, match="side by side"):
        find_schemes(replace(bundled("llama-2-7b"), parallel=True), 4, PAPER)


FAST = Rates(flops=312e12, memory_bytes_per_s=1e15, link_bytes_per_s=16e9)


def names(rates: Rates, schemes: list[Scheme], *, overlap: bool) -> dict[int, int]:
    """The first length of each span, and the scheme's place in the paper's list."""
    spans = fastest(schemes, rates, 200_000, overlap=overlap)
    assert spans[0].first == 1 and spans[-1].last == 200_000
    assert all(a.last + 1 == b.first for a, b in pairwise(spans))
    return {span.first: schemes.index(span.scheme) for span in spans}


def test_weight_gathering_begins_at_three_halves_of_the_mlp() -> None:
    """Against the first s > 3 f / 2, half of that with int8 weights."""
    schemes = find_schemes(bundled("llama-2-7b"), 4, PAPER)
    first, _, third = schemes
    f = 11008
    assert names(FAST, [first, third], overlap=False) == {1: 0, 3 * f // 2 + 1: 1}
    slim = replace(FAST, weight_bytes=1.0)
    assert names(slim, [first, third], overlap=False) == {1: 0, 3 * f // 4 + 1: 1}


def test_the_whole_projection_pays_where_links_are_slow() -> None:
    """F b > 2 h W, whatever the length, from h W / M on."""
    schemes = find_schemes(bundled("llama-2-7b"), 4, PAPER)[:2]
    h = 4096
    edge = FAST.flops * 2.0 / (2 * h)
    slower, faster = (replace(FAST, link_bytes_per_s=edge * x) for x in (0.99, 1.01))
    assert names(slower, schemes, overlap=False) == {1: 1}
    assert names(faster, schemes, overlap=False) == {1: 0}
    # Long before arithmetic counts: the projection is read for as long as it saves.
    memory = replace(FAST, flops=1e18, memory_bytes_per_s=2e12, link_bytes_per_s=40e9)
    ((_, place), (begin, other)) = names(memory, schemes, overlap=False).items()
    assert (place, other) == (0, 1) and begin == h * 40e9 // 2e12 + 1


def test_overlapped_gathering_begins_sooner() -> None:
    """When arithmetic hides it: near 3 f b F (p-1) / (2 W (4 h + 3 f)), somewhat before, since what
    is saved pays for a part."""
    model = bundled("llama-2-7b")
    h, f, p = model.hidden_size, model.intermediate_size, 4
    schemes = find_schemes(model, p, PAPER)
    rates = replace(FAST, flops=100e12, link_bytes_per_s=64e9)
    plain = names(rates, [schemes[0], schemes[2]], overlap=False)
    begin = max(names(rates, [schemes[0], schemes[2]], overlap=True))
    hidden = 3 * f * 2 * 100e12 * (p - 1) / (2 * 64e9 * (4 * h + 3 * f))
    assert max(plain) - 3 * f // 2 in (0, 1)  # equally fast at 3 f / 2

    def late(s: int) -> float:
        """By how much its gathering takes longer than arithmetic and what it saves."""
        saved = 2 * s * h * 0.75 * 2 / 64e9
        computed = layer_seconds(
            replace_moves(schemes[0]), np.array([float(s)]), rates, overlap=False
        )
        return 3 * h * f * 0.75 * 2 / 64e9 - saved - float(computed[0])

    assert late(begin) <= 0 < late(begin - 1)
    assert 0.5 * hidden < begin < hidden


def replace_moves(scheme: Scheme) -> Scheme:
    """The same without its moves."""
    choices = tuple(replace(own, moved={}, num_collectives=0) for own in scheme.choices)
    return replace(scheme, choices=choices)


def test_polynomials() -> None:
    one, other = Polynomial(1, 2, 3), Polynomial(4, 0, 1)
    assert (one + other).at(2) == one.at(2) + other.at(2) == 17 + 8
    assert (one - other).coefficients == (-3, 2, 2)
    assert Rules() == PAPER
