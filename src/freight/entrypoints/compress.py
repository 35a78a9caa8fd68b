"""``freight compress``: a model's matrices made small, once, ahead of the runs that use them; those
of a checkpoint that is quantised already put into the form that runs read.

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
from freight.model.adapter import has_adapter
from freight.model.checkpoint import resolve
from freight.model.compression import packed_formats
from freight.model.config import read_config
from freight.model.gguf_tensors import find_gguf
from freight.model.number_format import find_compression
from freight.model.task import for_task
from freight.runtime.options import EngineOptions

__all__ = ["compress_ahead", "compress_model"]


def compress_model(arguments: argparse.Namespace) -> int:
    """Make what is not kept yet; returns the exit status."""
    from freight.runtime.compressed_files import compressed_sources, default_directory

    model_dir = find_model(arguments.model, arguments.lora)
    config = for_task(read_config(model_dir), arguments.task)
    sources = resolve(config, model_dir)
    compression = find_compression(
        weight_bits=arguments.weight_bits,
        group_size=arguments.group_size,
        group_dim=arguments.group_dim,
        compute=arguments.compute,
        lossless=arguments.lossless,
    )
    if compression is None and not packed_formats(sources):
        raise InputError(
            "No number of bits was given.",
            "Weights are compressed to 4 or to 8 bits, or to 11 with nothing lost; the checkpoint "
            "is not quantised already.",
            "Pass --weight-bits 4, or --lossless.",
        )
    places = compressed_sources(
        config,
        sources,
        compression,
        directory=Path(arguments.compressed_dir or default_directory()),
        say=lambda text: print(text, file=sys.stderr),
    )
    kept = {place.path.parent for place in places.values() if place.path.name == "weights.bin"}
    print("\n".join(str(path) for path in sorted(kept)) or "nothing to compress")
    return 0


def compress_ahead(options: EngineOptions, model_dir: Path, say: Callable[[str], None]) -> None:
    """Compress, by another process, what the engine will want and is not kept yet. Where that
    fails, the engine does it and says why not."""
    if options.dummy_seed is not None:
        return
    config = for_task(read_config(model_dir), options.task)
    is_plain = config.packing is None and find_gguf(model_dir) is None
    if options.compression is None and is_plain and not has_adapter(model_dir):
        return
    from freight.runtime.compressed_files import (
        announcement,
        default_directory,
        settle_compute,
    )
    from freight.runtime.device import choose_dtype, find_device

    device, sources = find_device(options.device), resolve(config, model_dir)
    dtype = choose_dtype(options.dtype, device)
    options = settle_compute(options, sources, device, dtype, lambda _: None)
    directory = options.compressed_dir or default_directory()
    news = announcement(config, sources, options.compression, directory=directory)
    if news is None:
        return
    say(news)
    flags = [
        "--task",
        options.task,
        "--compute",
        options.compute,
        "--group-size",
        str(options.group_size),
    ]
    flags += ["--group-dim", options.group_dim]
    flags += ["--lossless"] if options.lossless else []
    if options.weight_bits is not None:
        flags += ["--weight-bits", str(options.weight_bits)]
    flags += ["--model", str(model_dir), "--compressed-dir", str(directory)]
    subprocess.run(
        [sys.executable, "-m", "freight", "compress", *flags],
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
