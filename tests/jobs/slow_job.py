"""A job with a slow engine, to be killed from outside: INPUT OUTPUT MODEL_DIR [unordered]."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fakes import FakeEngine, Watcher

from freight.jobs.formats import RowLimits
from freight.jobs.runner import JobSpec, run_job
from freight.runtime.request import SamplingParams
from freight.runtime.tokenizer import Tokenizer


class Unasked(Watcher):
    def on_start(self, **counts: object) -> None:
        print(counts["num_done"], flush=True)  # tells the killer that rows begin to flow


source, sink, model_dir, *rest = sys.argv[1:]
run_job(
    JobSpec(
        source=Path(source),
        sink=Path(sink),
        sampling=SamplingParams(max_tokens=8),
        unordered=bool(rest),
    ),
    tokenizer=Tokenizer(Path(model_dir)),
    limits=RowLimits(max_positions=64, vocab_size=320),
    identity={},
    build_engine=lambda workload: FakeEngine(workload, block_size=16, delay_s=0.001),
    observer=Unasked(),
)
