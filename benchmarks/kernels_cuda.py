"""Triton's kernels beside their references and the best of torch, on a CUDA device: medians of
alternating turns, timed by events on the device.

    python benchmarks/kernels_cuda.py [--turns 50]

Everything is taken from copies in turn that together are larger than the caches, as in a run.
Attention: 8 heads of keys of 128, 4 queries each; torch's own is given keys and values side by
side. Each kernel is first tried as a run tries it; one that is left out is said and not timed. The
ceiling is how fast this memory is read. The last line is one JSON object, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from freight.kernels.cuda.choice import NO_KERNELS, Kernels, kernels_of, use_kernels
from freight.kernels.grouped import CompressedRows, dequantise, quantise, small_product
from freight.kernels.pages import Pages
from freight.model.attention import append, attend
from freight.model.batch import RowKey, RowSpan
from freight.model.kv_view import KVView, index_rows
from freight.model.number_format import Grouped
from freight.model.programme import Attend
from freight.model.workspace import Workspace
from freight.runtime.kernel_choice import choose_kernels

KV_HEADS, SHARING, WIDTH, PAGE = 8, 4, 128, 32
FOUR, EIGHT = Grouped(bits=4, group_size=64), Grouped(bits=8, group_size=64)
SIZE = 4096
COLD_BYTES = 512 << 20
"""Copies in turn: more than ten times the caches of an H100."""
READ_BYTES = 1 << 30
Work = Callable[[int], object]
Turns = Mapping[str, Work]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Where it runs, and the kernels that work there."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def on_reference(self, work: Work) -> Work:
        """The same without kernels."""

        def alone(turn: int) -> object:
            use_kernels(self.device, NO_KERNELS)
            try:
                return work(turn)
            finally:
                use_kernels(self.device, self.kernels)

        return alone


def timed(turns: Turns, count: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turn; the first round does not count."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(count + 1):
        for name, work in turns.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work(number)
            end.record()
            end.synchronize()
            if number:
                found[name].append(start.elapsed_time(end))
    return {name: statistics.median(own) for name, own in found.items()}


def copies(num_bytes: int) -> int:
    return max(2, -(-COLD_BYTES // num_bytes))


def products(bench: Bench) -> dict[str, Turns]:
    """A matrix of 4096 x 4096 made plain, and times few tokens."""
    plain = [bench.random(SIZE, SIZE) for _ in range(copies(2 * SIZE * SIZE))]
    one = plain[0]
    found: dict[str, Turns] = {}
    out = torch.empty_like(one)
    for own in (FOUR, EIGHT):
        raw = quantise(one, own)
        held = [raw.clone() for _ in range(copies(raw.numel()))]
        rows = [CompressedRows(raw=each, columns=SIZE, number_format=own) for each in held]

        def make_plain(turn: int, rows: Sequence[CompressedRows] = rows) -> None:
            dequantise(rows[turn % len(rows)], out)

        found[f"dequantise, {own.bits} bits"] = {
            "kernel": make_plain,
            "torch": bench.on_reference(make_plain),
        }
        for tokens in (1, 4, 16):
            x = bench.random(tokens, SIZE)

            def fused(
                turn: int, x: torch.Tensor = x, rows: Sequence[CompressedRows] = rows
            ) -> torch.Tensor | None:
                return small_product(x, rows[turn % len(rows)])

            def made_plain_first(
                turn: int, x: torch.Tensor = x, make: Work = make_plain
            ) -> torch.Tensor:
                make(turn)
                return x @ out.t()

            def of_plain(turn: int, x: torch.Tensor = x) -> torch.Tensor:
                return x @ plain[turn % len(plain)].t()

            product = fused(0)
            assert product is not None
            torch.testing.assert_close(
                product.to(bench.dtype), made_plain_first(0).to(bench.dtype), rtol=0.05, atol=0.5
            )
            found[f"{tokens} tokens, {own.bits} bits"] = {
                "kernel": fused,
                "kernel makes plain, torch multiplies": made_plain_first,
                "torch, plain weights": of_plain,
            }
    return found


class Attention:
    """Rows of so many tokens, in pages of a layer; layers in turn."""

    def __init__(self, bench: Bench, lengths: Sequence[int], kept: Grouped | None) -> None:
        self.step = replace(STEP, kv_format=kept)
        self.bench = bench
        counts = [-(-length // PAGE) for length in lengths]
        token = WIDTH * bench.dtype.itemsize if kept is None else kept.row_bytes(WIDTH)
        shape = (sum(counts), 2 * KV_HEADS * PAGE * token)
        self.num_bytes = 2 * KV_HEADS * token * sum(lengths)
        order = torch.randperm(sum(counts)).split(counts)
        tables = [own.tolist() for own in order]
        self.pages = [
            Pages(
                raw=torch.zeros(shape, dtype=torch.uint8, device=bench.device),
                num_heads=KV_HEADS,
                page_tokens=PAGE,
                width=WIDTH,
                dtype=bench.dtype,
                number_format=kept,
            )
            for _ in range(copies(shape[0] * shape[1]))
        ]
        total = sum(lengths)
        self.k, self.v = (bench.random(total, KV_HEADS, WIDTH) for _ in range(2))
        self.whole = self._index(lengths, [0] * len(lengths), tables)
        for pages in self.pages:
            append(pages, self.whole, self.k, self.v)
        self.view = self._index([1] * len(lengths), [n - 1 for n in lengths], tables)
        use_kernels(bench.device, NO_KERNELS)
        self.bounded_view = self._index([1] * len(lengths), [n - 1 for n in lengths], tables)
        use_kernels(bench.device, bench.kernels)
        self.q = bench.random(len(lengths), KV_HEADS * SHARING, WIDTH)
        self.out = torch.empty_like(self.q)
        room = 2 * max(lengths) * KV_HEADS * (2 * WIDTH + 2 * SHARING) * 4 + (256 << 20)
        self.workspace = Workspace(torch.empty(room, dtype=torch.uint8, device=bench.device))

    def _index(
        self, new: Sequence[int], before: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> KVView:
        spans, start = [], 0
        for row, (count, kv_len) in enumerate(zip(new, before, strict=True)):
            spans.append(
                RowSpan(
                    row=RowKey(row), start=start, num_new=count, kv_len=kv_len, logit_positions=()
                )
            )
            start += count
        return index_rows(
            spans,
            tables,
            start=0,
            page_tokens=PAGE,
            num_heads=KV_HEADS * SHARING,
            num_kv_heads=KV_HEADS,
            head_dim=WIDTH,
            element_bytes=self.bench.dtype.itemsize,
            device=self.bench.device,
        )

    def attend(self, turn: int, view: KVView) -> torch.Tensor:
        pages = self.pages[turn % len(self.pages)]
        attend(self.step, self.q, pages, view, self.out, self.workspace)
        return self.out

    def turns(self) -> Turns:
        reference = self.bench.on_reference(lambda turn: self.attend(turn, self.bounded_view))
        wanted = reference(0)
        assert isinstance(wanted, torch.Tensor)
        wanted = wanted.clone()
        torch.testing.assert_close(self.attend(0, self.view), wanted, rtol=0.05, atol=0.02)
        return {"kernel": lambda turn: self.attend(turn, self.view), "torch": reference}


STEP = Attend(
    q="q",
    k="k",
    v="v",
    out="out",
    num_heads=KV_HEADS * SHARING,
    num_kv_heads=KV_HEADS,
    head_dim=WIDTH,
    scale=WIDTH**-0.5,
)
KEPT = {"plain": None, "4 bits": FOUR, "8 bits": EIGHT}


def fused_by_torch(bench: Bench, num_rows: int, length: int) -> Work:
    """Rows of one length, side by side."""
    shape = (num_rows, KV_HEADS, length, WIDTH)
    count = copies(2 * 2 * num_rows * KV_HEADS * length * WIDTH)
    keys = [(bench.random(*shape), bench.random(*shape)) for _ in range(count)]
    q = bench.random(num_rows, KV_HEADS, SHARING, WIDTH)

    def work(turn: int) -> torch.Tensor:
        k, v = keys[turn % count]
        return F.scaled_dot_product_attention(q, k, v)

    return work


def appending(bench: Bench) -> dict[str, Turns]:
    """New keys and values of many tokens of one row, and of one token of many rows."""
    found: dict[str, Turns] = {}
    for own in (FOUR, EIGHT):
        for name, lengths in (("a prompt of 2048", [2048]), ("64 rows' tokens", [1] * 64)):
            case = Attention(bench, lengths, own)

            def work(turn: int, case: Attention = case) -> None:
                append(case.pages[turn % len(case.pages)], case.whole, case.k, case.v)

            found[f"append {name}, {own.bits} bits"] = {
                "kernel": work,
                "torch": bench.on_reference(work),
            }
    return found


def attention(bench: Bench, turns: int) -> dict[str, float]:
    """Timed case by case: each takes gigabytes."""
    found: dict[str, float] = {}
    dice = torch.Generator().manual_seed(0)
    ragged = torch.randint(128, 999, (128,), generator=dice).tolist()
    for name, lengths in (
        ("128 rows of 1024", [1024] * 128),
        ("128 rows of 128 to 998", ragged),
        ("1 row of 32768", [32768]),
    ):
        for kind, kept in KEPT.items():
            case = Attention(bench, lengths, kept)
            own: dict[str, Work] = dict(case.turns())
            if kept is None and len(set(lengths)) == 1:
                own["torch, fused, side by side"] = fused_by_torch(bench, len(lengths), lengths[0])
            times = timed(own, turns)
            rate = case.num_bytes / times["kernel"] / 1e6
            print(f"{name}, {kind}: the kernel reads {rate:.0f} GB/s")
            found |= {f"{name}, {kind}: {way}": value for way, value in times.items()}
            del case, own
            torch.cuda.empty_cache()
    return found


def reading(bench: Bench) -> Turns:
    """How fast this memory is read: the ceiling."""
    numbers = torch.ones(READ_BYTES // 4, device=bench.device)
    return {"read": lambda _: numbers.sum()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=50, metavar="N")
    count = parser.parse_args().turns
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here: nothing was measured.")
    torch.manual_seed(0)
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    steps = [replace(STEP, kv_format=kept) for kept in KEPT.values()]
    choose_kernels(device, dtype, weights=[FOUR, EIGHT], steps=steps, say=print)
    kernels = kernels_of(device)
    if None in (kernels.make_plain, kernels.multiply, kernels.append, kernels.attend):
        raise SystemExit("Not all kernels work here: nothing was measured.")
    bench = Bench(device=device, dtype=dtype, kernels=kernels)
    read = timed(reading(bench), count)
    name = torch.cuda.get_device_name(device)
    print(f"{name}: reads {READ_BYTES / read['read'] / 1e6:.0f} GB/s")
    found = dict(read)
    for cases in (products(bench), appending(bench)):
        for name, own in cases.items():
            found |= {f"{name}: {way}": value for way, value in timed(own, count).items()}
    torch.cuda.empty_cache()
    found |= attention(bench, count)
    for name, milliseconds in found.items():
        print(f"{name:<64}{milliseconds:9.3f} ms")
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
