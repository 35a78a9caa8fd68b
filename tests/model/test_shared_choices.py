"""Layers that attend the keys another one's indexer has chosen: each query attends what a sum over
all tokens of its row in float64 says, in both layers alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.kernels.row_states import RowStates
from freight.model import kept_choice
from freight.model.frame import Frame, LayerStates
from freight.model.kept_steps import AttendChosen, ChooseKeys
from freight.model.layer_kinds import Index, KeptLatents
from freight.model.layers import run_unit
from freight.model.programme import Unit
from freight.model.workspace import Workspace

HEADS, WIDTH, CHOOSING, NARROW, MOST = 3, 8, 16, 6, 64
CHOOSES = AttendChosen(
    q="q",
    k="k",
    out="out",
    num_heads=HEADS,
    width=WIDTH,
    scale=0.4,
    sinks=None,
    num_chosen=5,
    most_keys=MOST,
    index=ChooseKeys(q="index_q", k="index_k", weights="weights", num_heads=CHOOSING, width=NARROW),
    chosen="chosen",
)
TAKES_OVER = replace(CHOOSES, index=None)
VALUES = {"q": HEADS * WIDTH, "k": WIDTH}
INDEX = {"index_q": CHOOSING * NARROW, "index_k": NARROW, "weights": CHOOSING}
SCRATCH = torch.empty(1 << 16, dtype=torch.uint8)


def wanted(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> torch.Tensor:
    """What ``other`` attends of a row, of keys that ``own`` chooses."""
    out = torch.zeros(len(other["q"]), HEADS, WIDTH, dtype=torch.float64)
    for token in range(len(out)):
        asked = own["index_q"][token].double().view(CHOOSING, NARROW)
        likeness = (asked @ own["index_k"][: token + 1].double().T).relu()
        scores = own["weights"][token].double() @ likeness
        chosen = scores.topk(min(CHOOSES.num_chosen, token + 1)).indices
        keys = other["k"][chosen].double()
        for head, query in enumerate(other["q"][token].double().view(HEADS, WIDTH)):
            out[token, head] = (CHOOSES.scale * keys @ query).softmax(0) @ keys
    return out.flatten(1)


def made(widths: dict[str, int], num_tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.randn(num_tokens, width).to(dtype) for name, width in widths.items()}


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_two_layers_attend_the_same_keys(data: st.DataObject) -> None:
    """Rows side by side, in any pieces, of which some are too short for a choice; what is looked at
    at once differs by layer. Beside what was chosen lie other columns, an odd number of them."""
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    counts = data.draw(st.lists(st.integers(1, MOST), min_size=1, max_size=4))
    first = [made({**VALUES, **INDEX}, count, dtype) for count in counts]
    second = [made(VALUES, count, dtype) for count in counts]
    kept = [
        torch.full((len(counts), MOST * (WIDTH + NARROW) // WIDTH, WIDTH), torch.nan, dtype=dtype)
        for _ in range(2)
    ]
    done, found = [0] * len(counts), [[list[torch.Tensor]() for _ in counts] for _ in range(2)]
    while done != counts:
        pieces = [
            (row, data.draw(st.sampled_from([1, 1, 4, 9, 40])))
            for row, count in enumerate(counts)
            if done[row] < count
        ]
        pieces = [(row, min(size, counts[row] - done[row])) for row, size in pieces]
        sizes = [size for _, size in pieces]
        rows = RowStates(
            starts=np.cumsum(sizes) - sizes,
            counts=np.array(sizes),
            seats=np.array([row for row, _ in pieces]),
            is_new=np.array([done[row] == 0 for row, _ in pieces], np.int64),
            lengths=np.array([done[row] for row, _ in pieces]),
        )
        stream = torch.full((sum(sizes), 3 + 2 * CHOOSES.num_chosen), torch.nan, dtype=dtype)
        for layer, (step, own) in enumerate([(CHOOSES, first), (TAKES_OVER, second)]):
            values = {
                name: torch.cat([own[row][name][done[row] :][:size] for row, size in pieces])
                for name in own[0]
            }
            values["chosen"] = stream[:, 3:]
            states = LayerStates(rows=rows, columns=kept[layer], memory=torch.empty(0))
            frame = Frame(weights={}, workspace=Workspace(SCRATCH), values=values, states=[states])
            least = data.draw(st.sampled_from([1, 1 << 12, 1 << 22]))
            with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
                patch.setattr(kept_choice, "KEPT_BYTES", least)
                unit = Unit(name="own", kind="recurrence", layer=layer, steps=(step,))
                run_unit(unit, frame)
            for (row, _), part in zip(pieces, frame.values["out"].split(sizes), strict=True):
                found[layer][row].append(part.clone())
        for row, size in pieces:
            done[row] += size
    error = 2e-5 if dtype == torch.float32 else 3e-2
    for layer, own in enumerate([first, second]):
        for row, parts in enumerate(found[layer]):
            answer = wanted(first[row], own[row]).float()
            torch.testing.assert_close(torch.cat(parts).float(), answer, rtol=0, atol=error)


def test_what_is_left_for_others_takes_two_numbers_a_key_where_there_are_such() -> None:
    index = Index(num_heads=2, width=8, num_chosen=10, shared=(False, True, True))
    own = KeptLatents(layers=(True,) * 3, width=24, longest=64, index=index)
    assert own.chosen_columns == 20
    assert own.of_layers(slice(1, 3)).index.shared == (True, True)
    assert own.of_layers(slice(0, 1)).chosen_columns == 20
    assert replace(own, index=replace(index, shared=())).chosen_columns == 0
