"""Attention of rows that begin alike, in one layer: each row by itself, and all of them together
over what they share.

    python benchmarks/beginnings.py [--turns 15] [--dtype float32] [--shared 384] [--own 36]
        [--beginnings 1] [--heads 16]

Heads of 64, 4 heads of keys, pages of 16 tokens; rows that bring a token behind the shared and
their own keys, and rows that bring 32 tokens of a prompt behind the shared ones, so many for each
beginning. Medians and minima of alternating turns, in milliseconds. The last line is one JSON
object, of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from freight.kernels.paged import loops_attend
from freight.kernels.pages import Pages
from freight.model.attention import attend
from freight.model.batch import RowKey, RowSpan
from freight.model.kv_view import KVView, Stem, index_rows, index_stem
from freight.model.programme import Attend
from freight.model.stems import attend_stems
from freight.model.workspace import Workspace
from freight.quantities import MIB

KV_HEADS, WIDTH, PAGE = 4, 64, 16
CPU = torch.device("cpu")


class Rows:
    """So many rows that bring ``num_new`` tokens each behind ``kv_len`` keys, of which those of one
    of ``stems`` beginnings have ``shared`` in common."""

    def __init__(
        self,
        count: int,
        num_new: int,
        kv_len: int,
        shared: int,
        dtype: torch.dtype,
        *,
        heads: int,
        stems: int,
    ):
        self.step = Attend(
            q="q",
            k="k",
            v="v",
            out="out",
            num_heads=heads,
            num_kv_heads=KV_HEADS,
            head_dim=WIDTH,
            scale=WIDTH**-0.5,
        )
        held, own = shared // PAGE, -(-(kv_len + num_new) // PAGE) - shared // PAGE
        first = held * stems
        begun = [range(i * held, (i + 1) * held) for i in range(stems)]
        tables = [
            [*begun[i % stems], *range(first + i * own, first + (i + 1) * own)]
            for i in range(count * stems)
        ]
        spans = [
            RowSpan(
                row=RowKey(i),
                start=i * num_new,
                num_new=num_new,
                kv_len=kv_len,
                logit_positions=(),
                prefix=RowKey(-1 - i % stems),
                shared_len=shared,
            )
            for i in range(count * stems)
        ]
        found = [
            index_stem(
                spans[i::stems],
                begun[i],
                start=0,
                page_tokens=PAGE,
                num_kv_heads=KV_HEADS,
                device=CPU,
            )
            for i in range(stems)
        ]
        self.whole = _view(spans, tables, dtype, heads)
        self.parts = _view(
            [s.behind_prefix() for s in spans], [t[held:] for t in tables], dtype, heads, *found
        )
        numbers = torch.randn(first + own * len(spans), 2 * KV_HEADS * PAGE * WIDTH).to(dtype)
        self.pages = Pages(
            raw=numbers.view(torch.uint8),
            num_heads=KV_HEADS,
            page_tokens=PAGE,
            width=WIDTH,
            dtype=dtype,
        )
        self.q = torch.randn(len(spans) * num_new, heads, WIDTH).to(dtype)
        self.lse = torch.empty(len(spans) * num_new, heads)
        self.workspace = Workspace(torch.zeros(256 * MIB, dtype=torch.uint8))

    def apart(self) -> torch.Tensor:
        out = torch.empty_like(self.q)
        attend(self.step, self.q, self.pages, self.whole, out, self.workspace)
        return out

    def together(self) -> torch.Tensor:
        out = torch.empty_like(self.q)
        attend(self.step, self.q, self.pages, self.parts, out, self.workspace, self.lse)
        attend_stems(self.step, self.q, self.pages, self.parts, out, self.lse, self.workspace)
        return out


def _view(
    spans: list[RowSpan], tables: list[list[int]], dtype: torch.dtype, heads: int, *stems: Stem
) -> KVView:
    return index_rows(
        spans,
        tables,
        start=0,
        page_tokens=PAGE,
        num_heads=heads,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        element_bytes=dtype.itemsize,
        device=CPU,
        stems=stems,
        by_loop=loops_attend(CPU, WIDTH, dtype, None),
    )


def timed(turns: list[Callable[[], object]], count: int) -> list[list[float]]:
    """Milliseconds of each, taken in turn; the first round does not count."""
    found: list[list[float]] = [[] for _ in turns]
    for number in range(count + 1):
        for own, work in zip(found, turns, strict=True):
            started_s = time.perf_counter()
            work()
            if number:
                own.append(1e3 * (time.perf_counter() - started_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15, metavar="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--shared", type=int, default=384, metavar="N", help="tokens")
    parser.add_argument("--own", type=int, default=36, metavar="N", help="keys of each row")
    parser.add_argument("--beginnings", type=int, default=1, metavar="N")
    parser.add_argument("--heads", type=int, default=16, metavar="N")
    chosen = parser.parse_args()
    dtype = getattr(torch, chosen.dtype)
    torch.manual_seed(0)
    medians = {}
    for count, num_new in (
        (2, 1),
        (4, 1),
        (8, 1),
        (16, 1),
        (32, 1),
        (128, 1),
        (256, 1),
        (8, 32),
        (32, 32),
    ):
        kv_len = chosen.shared + (chosen.own if num_new == 1 else 0)
        rows = Rows(
            count,
            num_new,
            kv_len,
            chosen.shared,
            dtype,
            heads=chosen.heads,
            stems=chosen.beginnings,
        )
        slack = 1e-4 if dtype is torch.float32 else 0.05
        torch.testing.assert_close(rows.together(), rows.apart(), rtol=slack, atol=slack)
        apart, together = timed([rows.apart, rows.together], chosen.turns)
        name = f"{count} rows of {num_new}"
        medians[name] = [round(statistics.median(own), 3) for own in (apart, together)]
        print(
            f"{name:<16} apart {medians[name][0]:8.2f} ({min(apart):.2f})   "
            f"together {medians[name][1]:8.2f} ({min(together):.2f})"
        )
    print(json.dumps(medians))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
