#!/usr/bin/env python3
"""Tokens per second through HTTP beside those of `bench decode` at the same batch, in turn.

    python benchmarks/serving_throughput.py build/release/replayssm [--pairs 5]

Every pair is a run of `bench decode` and one of `bench serve` with as many clients as rows, on
streamed and on whole answers. The medians of the pairs' ratios come last.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "server"))
import harness  # noqa: E402


def ask(*command):
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def decoded(arguments):
    steps = ask(arguments.program, "bench", "decode", arguments.model, "--json", "--repeats", "1",
                "--batch-size", str(arguments.concurrency), "--num-steps", str(arguments.tokens))
    route = next(row for row in steps["results"] if row["route"] == "output_only")
    return arguments.concurrency * 1e3 / route["ms_per_step"]


def served(arguments, port, *flags):
    load = ask(arguments.program, "bench", "serve", "--port", str(port), "--json", *flags,
               "--num-prompts", str(arguments.concurrency), "--output-len", str(arguments.tokens),
               "--max-concurrency", str(arguments.concurrency))
    return load["output_tokens_per_second"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--model", default="tiny-qwen3.5")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512, help="of an answer")
    arguments = parser.parse_args()
    harness.PROGRAM = arguments.program
    ratios = {"streamed": [], "whole": []}
    flags = ("--max-num-seqs", str(arguments.concurrency))
    with harness.Server(*flags, model=arguments.model) as server:
        served(arguments, server.port)  # what happens once happens here
        for _ in range(arguments.pairs):
            base = decoded(arguments)
            line = f"bench decode {base:.0f} tok/s"
            for name, kind in (("streamed", ()), ("whole", ("--no-stream",))):
                rate = served(arguments, server.port, *kind)
                ratios[name].append(rate / base)
                line += f", {name} {rate:.0f} ({rate / base:.3f})"
            print(line, flush=True)
    for name, values in ratios.items():
        print(f"{name}: median of {len(values)} ratios {statistics.median(values):.3f}")


if __name__ == "__main__":
    main()
