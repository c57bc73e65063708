"""Run one bench: `python -m bench NAME [options]`, from the root of the repository.

A bench is a module here with `run(argv) -> int`. It checks that plans are correct before it measures, prints Markdown,
and leaves a record in `bench/results`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

BENCHES = {
    "quality": "step cost beside its bound, the best known and the transformers sampler, on real windows",
    "speed": "planning time on one core beside the transformers sampler, on the same windows",
    "scale": "1e8 samples: time to the first micro-batch, memory beyond the lengths, restoring a state",
    "latency": "what next() costs a training loop while later steps are planned",
    "kernels": "the GPU kernels beside other providers; compiled sizes and estimates without a GPU",
    "matrix": "the kernels under every supported version of Triton, interpreted and compiled",
    "overlap": "how often training waits for a plan, with planning faster and slower than a step, on 2 processes",
    "soak": "a long run of 2 processes: memory, file descriptors and threads must not grow",
    "partition": "balanced partitions of rollouts beside Karmarkar-Karp in Python",
    "memory": "peak memory beside length grouping, and the largest batch before out-of-memory, on one GPU",
}


def main(argv: list[str]) -> int:
    """Dispatch; returns the exit status."""
    if argv and argv[0] in ("--list", "-h", "--help"):
        print("usage: python -m bench NAME [options]; options of a bench: python -m bench NAME --help\n")
        print("\n".join(f"{name:9} {about}" for name, about in BENCHES.items()))
        return 0
    if not argv or argv[0] not in BENCHES:
        given = f"no bench is called {argv[0]!r}" if argv else "which bench?"
        print(f"bench: {given} Choose from {', '.join(BENCHES)}; --list says what they are", file=sys.stderr)
        return 2
    name = argv[0]
    if importlib.util.find_spec(f"bench.{name}") is None:
        print(f"bench: {name} is not part of this checkout", file=sys.stderr)
        return 2
    status: int = importlib.import_module(f"bench.{name}").run(argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
