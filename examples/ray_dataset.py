"""A dataset answered by several engines that Ray starts, on one machine or on a cluster.

    pip install "freight[ray]"
    python examples/ray_dataset.py rows.jsonl answers/ --model demo --actors 2

Each actor holds the model by itself. Rows have a ``prompt``, as those of ``freight run``. On a
cluster, started by ``ray start``, paths must lead to the same files on every machine.
"""

from __future__ import annotations

import argparse
import sys

import ray

from freight.entrypoints.ray_data import BatchAnswerer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", help="a file with one JSON object in each line")
    parser.add_argument("answers", help="a directory that is written")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--actors", type=int, default=2, help="engines, each with the whole model")
    parser.add_argument("--cpus", type=float, default=1.0, help="cores of each actor")
    parser.add_argument("--gpus", type=int, default=0, help="devices of each actor")
    parser.add_argument("--cpu-memory", default=None, help="of each actor, like 16GiB")
    parser.add_argument("--batch-size", type=int, default=1000, help="rows that run together")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    ray.init()
    cores = ray.cluster_resources().get("CPU", 0.0)
    if arguments.actors * arguments.cpus > cores - 1:  # reading and writing would wait for ever
        parser.error(f"Ray has {cores:g} cores: leave one of them to reading and writing")
    rows = ray.data.read_json(arguments.rows, lines=True)
    # A small file would be one block, and one actor's.
    rows = rows.repartition(target_num_rows_per_block=arguments.batch_size)
    answers = rows.map_batches(
        BatchAnswerer,
        fn_constructor_kwargs={
            "model": arguments.model,
            "params": {"max_tokens": arguments.max_tokens},
            "cpu_memory": arguments.cpu_memory,
        },
        compute=ray.data.ActorPoolStrategy(size=arguments.actors),
        num_cpus=arguments.cpus,
        num_gpus=arguments.gpus,
        batch_size=arguments.batch_size,
    )
    answers.write_json(arguments.answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
