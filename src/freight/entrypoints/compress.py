"""``freight compress``: a model's matrices made small, once, ahead of the runs that use them.

Runs call it themselves, in a process of its own: what compressing takes would count against their
memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from freight.entrypoints.model_source import find_model
from freight.errors import InputError
from freight.model.checkpoint import resolve
from freight.model.config import read_config
from freight.model.number_format import find_compression
from freight.runtime.options import EngineOptions

__all__ = ["compress_ahead", "compress_model"]


def compress_model(arguments: argparse.Namespace) -> int:
    """Make what is not kept yet; returns the exit status."""
    compression = find_compression(
        weight_bits=arguments.weight_bits,
        group_size=arguments.group_size,
        compute=arguments.compute,
    )
    if compression is None:
        raise InputError(
            "No number of bits was given.",
            "Weights are compressed to 4 or to 8 bits.",
            "Pass --weight-bits 4.",
        )
    from freight.runtime.compressed_files import compressed_sources, default_directory

    model_dir = find_model(arguments.model)
    config = read_config(model_dir)
    places = compressed_sources(
        config,
        resolve(config, model_dir),
        compression,
        directory=Path(arguments.compressed_dir or default_directory()),
        say=lambda text: print(text, file=sys.stderr),
    )
    kept = {place.path.parent for place in places.values() if place.path.name == "weights.bin"}
    print("\n".join(str(path) for path in sorted(kept)) or "nothing to compress")
    return 0


def compress_ahead(options: EngineOptions, model_dir: Path, say: Callable[[str], None]) -> None:
    """Compress, by another process, what the engine will want and is not kept yet. Where that
    fails, the engine does it and says why not; where it will compute otherwise, nothing is done."""
    compression = options.compression
    if compression is None or options.dummy_seed is not None:
        return
    from freight.runtime.compressed_files import are_kept, default_directory
    from freight.runtime.device import choose_compute, choose_dtype, find_device

    device = find_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    if choose_compute(options.compute, device, dtype, lambda _: None) != options.compute:
        return
    config = read_config(model_dir)
    directory = options.compressed_dir or default_directory()
    if are_kept(config, resolve(config, model_dir), compression, directory=directory):
        return
    say(f"compressing the weights ({compression}), once, into {directory}")
    flags = ["--compute", options.compute, "--group-size", str(options.group_size)]
    if options.weight_bits is not None:
        flags += ["--weight-bits", str(options.weight_bits)]
    flags += ["--model", str(model_dir), "--compressed-dir", str(directory)]
    subprocess.run(
        [sys.executable, "-m", "freight", "compress", *flags],
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
