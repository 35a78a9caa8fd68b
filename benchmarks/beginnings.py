"""Attention of rows that begin alike, in one layer: each row by itself, and all of them together
over what they share.

    python benchmarks/beginnings.py [--turns 15] [--dtype float32] [--shared 384] [--own 36]

16 heads of 64, 4 heads of keys, pages of 16 tokens; rows that bring a token behind the shared and
their own keys, and rows that bring 32 tokens of a prompt behind the shared ones. Medians and minima
of alternating turns, in milliseconds. The last line is one JSON object, of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from freight.kernels.pages import Pages
from freight.model.attention import attend, attend_stems
from freight.model.batch import RowKey, RowSpan
from freight.model.kv_view import KVView, Stem, index_rows, index_stem
from freight.model.programme import Attend
from freight.model.workspace import Workspace
from freight.quantities import MIB

HEADS, KV_HEADS, WIDTH, PAGE = 16, 4, 64, 16
CPU = torch.device("cpu")


class Rows:
    """So many rows that bring ``num_new`` tokens each behind ``kv_len`` keys, ``shared`` of them in
    common."""

    def __init__(self, count: int, num_new: int, kv_len: int, shared: int, dtype: torch.dtype):
        self.step = Attend(
            q="q",
            k="k",
            v="v",
            out="out",
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=WIDTH,
            scale=WIDTH**-0.5,
        )
        held, own = shared // PAGE, -(-(kv_len + num_new) // PAGE) - shared // PAGE
        tables = [
            [*range(held), *range(held + i * own, held + (i + 1) * own)] for i in range(count)
        ]
        spans = [
            RowSpan(
                row=RowKey(i),
                start=i * num_new,
                num_new=num_new,
                kv_len=kv_len,
                logit_positions=(),
                prefix=RowKey(-1),
                shared_len=shared,
            )
            for i in range(count)
        ]
        stem = index_stem(
            spans, range(held), start=0, page_tokens=PAGE, num_kv_heads=KV_HEADS, device=CPU
        )
        self.whole = _view(spans, tables, dtype)
        self.parts = _view(
            [s.behind_prefix() for s in spans], [t[held:] for t in tables], dtype, stem
        )
        numbers = torch.randn(held + own * count, 2 * KV_HEADS * PAGE * WIDTH).to(dtype)
        self.pages = Pages(
            raw=numbers.view(torch.uint8),
            num_heads=KV_HEADS,
            page_tokens=PAGE,
            width=WIDTH,
            dtype=dtype,
        )
        self.q = torch.randn(count * num_new, HEADS, WIDTH).to(dtype)
        self.lse = torch.empty(count * num_new, HEADS)
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
    spans: list[RowSpan], tables: list[list[int]], dtype: torch.dtype, *stems: Stem
) -> KVView:
    return index_rows(
        spans,
        tables,
        start=0,
        page_tokens=PAGE,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        element_bytes=dtype.itemsize,
        device=CPU,
        stems=stems,
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
    chosen = parser.parse_args()
    dtype = getattr(torch, chosen.dtype)
    torch.manual_seed(0)
    medians = {}
    for count, num_new in ((2, 1), (4, 1), (8, 1), (32, 1), (128, 1), (256, 1), (8, 32), (32, 32)):
        kv_len = chosen.shared + (chosen.own if num_new == 1 else 0)
        rows = Rows(count, num_new, kv_len, chosen.shared, dtype)
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
