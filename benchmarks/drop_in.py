#!/usr/bin/env python3
"""Times the package's drop-in functions on a GPU, beside the published ones where vLLM has them.

    python benchmarks/drop_in.py [--batch-sizes 1,8,32] [--only mamba2] [--times 0]

Three tables, published -> ours. How far outputs, states and caches of both lie apart after the same
steps on the same tensors, as relative L2. Microseconds of the host per call at batch 1. Microseconds
per layer and step: CUDA graphs over whole flush cycles with staggered rows, as many layers as leave
nothing in the L2 cache, both implementations in turn, medians.
"""

import argparse
import importlib
import statistics
import time

import torch

import replayssm

F32, BF16 = torch.float32, torch.bfloat16
MAMBA2 = "vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_"
GDN = "vllm.model_executor.layers.fla.ops."


def published(module, name):
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def normal(*shape, dtype=BF16, scale=0.5):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


class Single:
    """Positions of rows over a cycle of single steps."""

    def __init__(self, batch, length=16):
        self.batch, self.length, self.steps = batch, length, length
        rows = torch.arange(batch, device="cuda")
        self.write_pos = [((rows + t) % length).int() for t in range(length)]
        self.is_flush = [(x == length - 1).to(torch.int8) for x in self.write_pos]
        self.slot = torch.arange(1, batch + 1, device="cuda", dtype=torch.int32)


class Window:
    """Cursors over steps that accept 1 .. T of T tokens."""

    def __init__(self, batch, tokens=5, history=16, steps=12, warm=8):
        self.batch, self.tokens, self.steps = batch, tokens, steps
        self.threshold = history + tokens
        self.ring = 1 << (self.threshold - 1).bit_length()
        generator = torch.Generator().manual_seed(0)
        draw = lambda low, high: torch.randint(low, high, (batch + 1,), generator=generator)
        write_pos, origin = draw(0, self.threshold - 2 * tokens + 1), draw(0, self.ring)
        self.cursors = []
        for _ in range(steps + warm):
            flush = write_pos + 2 * tokens > self.threshold
            now = (write_pos.int(), origin.int(), flush.to(torch.int8))
            self.cursors.append([x.cuda() for x in now])
            accepted = draw(1, tokens + 1)
            origin = torch.where(flush, (origin + write_pos) % self.ring, origin)
            write_pos = torch.where(flush, accepted, write_pos + accepted)
        self.cursors = self.cursors[warm:]
        self.starts = torch.arange(0, batch * tokens + 1, tokens, device="cuda", dtype=torch.int32)
        self.slot = torch.arange(1, batch + 1, device="cuda", dtype=torch.int32)


class Mamba2Single(Single):
    ours = staticmethod(replayssm.selective_state_update_replayssm_output_only)
    theirs = published(MAMBA2 + "output_only", "selective_state_update_replayssm_output_only")

    def __init__(self, batch, layers, heads, dim, groups, n, dtype):
        super().__init__(batch)
        slots, length = batch + 1, self.length
        self.states = [normal(slots, heads, dim, n, dtype=dtype) for _ in range(layers)]
        self.caches = [
            {
                "x_cache": normal(slots, heads, length, dim),
                "dt_cache": torch.rand(slots, heads, length, device="cuda"),
                "B_cache": normal(slots, groups, length, n),
            }
            for _ in range(layers)
        ]
        self.out = normal(batch, heads, dim)
        tied = lambda x, *sizes: x.reshape(-1, *([1] * len(sizes))).expand(-1, *sizes)
        self.tokens = (
            normal(batch, heads, dim),
            normal(batch, heads)[:, :, None].expand(-1, -1, dim),
            tied(-torch.rand(heads, device="cuda"), dim, n),
            normal(batch, groups, n),
            normal(batch, groups, n),
        )
        self.options = {
            "D": tied(normal(heads, dtype=F32), dim),
            "dt_bias": tied(normal(heads, dtype=F32), dim),
            "dt_softplus": True,
            "max_cache_len": length,
            "state_batch_indices": self.slot,
            "out": self.out,
            "bc_pre": torch.zeros(batch, groups, length, device="cuda"),
        }

    def run(self, function, layer, step):
        function(
            self.states[layer], *self.tokens, write_pos=self.write_pos[step],
            is_flush=self.is_flush[step], **self.caches[layer], **self.options,
        )  # fmt: skip


class GatedDeltaSingle(Single):
    ours = staticmethod(replayssm.fused_recurrent_gated_delta_rule_replayssm)
    theirs = published(
        GDN + "fused_recurrent_replayssm", "fused_recurrent_gated_delta_rule_replayssm"
    )

    def __init__(self, batch, layers, heads, dim, key_heads, n, dtype):
        super().__init__(batch)
        self.states, self.caches, self.tokens = gated_delta(
            batch, batch, layers, heads, dim, key_heads, n, dtype, self.length
        )
        self.scale, self.out = n**-0.5, normal(batch, heads, dim)

    def run(self, function, layer, step):
        function(
            *self.tokens, self.scale, self.states[layer], *self.caches[layer], self.out, self.slot,
            self.write_pos[step], use_qk_l2norm_in_kernel=True,
        )  # fmt: skip


def gated_delta(batch, tokens, layers, heads, dim, key_heads, n, dtype, rows):
    slots = batch + 1
    states = [normal(slots, heads, dim, n, dtype=dtype) for _ in range(layers)]
    caches = [
        (
            normal(slots, heads, rows, dim),
            normal(slots, key_heads, rows, n, scale=n**-0.5),
            -torch.rand(slots, heads, rows, device="cuda"),
        )
        for _ in range(layers)
    ]
    constants = normal(heads, dtype=F32), normal(heads, dtype=F32)
    mixed = normal(tokens, 2 * key_heads * n + heads * dim)
    return states, caches, (mixed, normal(tokens, heads), normal(tokens, heads), *constants)


class Mamba2Window(Window):
    ours = staticmethod(replayssm.selective_state_update_replayssm_spec)
    theirs = published(MAMBA2 + "spec", "selective_state_update_replayssm_spec")

    def __init__(self, batch, layers, heads, dim, groups, n, dtype):
        super().__init__(batch)
        slots, tokens, inner = batch + 1, batch * self.tokens, heads * dim
        self.states = [normal(slots, heads, dim, n, dtype=dtype) for _ in range(layers)]
        self.caches = [
            (
                normal(slots, self.ring, inner + groups * n),
                normal(slots, heads, self.ring, dtype=F32),
            )
            for _ in range(layers)
        ]
        self.inputs = normal(tokens, inner + 2 * groups * n), normal(tokens, heads)
        self.out = normal(tokens, heads, dim)
        self.a = (-torch.rand(heads, device="cuda"))[:, None, None].expand(-1, dim, n)
        self.sizes = self.threshold, self.tokens, inner, groups, n
        per_head = lambda: normal(heads, dtype=F32)[:, None].expand(-1, dim)
        self.options = {
            "D": per_head(),
            "dt_bias": per_head(),
            "out": self.out,
            "bc_pre": normal(batch, groups, self.ring, 1 << (self.tokens - 1).bit_length()),
        }

    def run(self, function, layer, step):
        function(
            self.states[layer], *self.caches[layer], *self.inputs, self.a, *self.cursors[step],
            self.starts, self.slot, *self.sizes, **self.options,
        )  # fmt: skip


class GatedDeltaWindow(Window):
    ours = staticmethod(replayssm.gdn_replayssm_spec_decode)
    theirs = published(GDN + "gdn_replayssm_spec_decode", "gdn_replayssm_spec_decode")

    def __init__(self, batch, layers, heads, dim, key_heads, n, dtype):
        super().__init__(batch)
        tokens = batch * self.tokens
        self.states, self.caches, self.inputs = gated_delta(
            batch, tokens, layers, heads, dim, key_heads, n, dtype, self.ring
        )
        self.out = normal(tokens, heads, dim)

    def run(self, function, layer, step):
        function(
            *self.inputs, self.states[layer], *self.caches[layer], self.out, self.starts, self.slot,
            *self.cursors[step], self.threshold, self.tokens,
        )  # fmt: skip


def memory(case):
    """What the functions write, of one layer."""
    caches = case.caches[0]
    caches = caches.values() if isinstance(caches, dict) else caches
    return [case.states[0], *caches]


def results(case, function):
    """All outputs of a cycle, then what is left in memory; memory is as before."""
    before = [x.clone() for x in memory(case)]
    outputs = []
    for step in range(case.steps):
        case.run(function, 0, step)
        outputs.append(case.out.clone())
    after = [x.clone() for x in memory(case)]
    for x, old in zip(memory(case), before, strict=True):
        x.copy_(old)
    return [torch.stack(outputs), *after]


def distances(kind, batch, *geometry):
    case = kind(batch, 1, *geometry)
    pairs = zip(results(case, kind.theirs), results(case, kind.ours), strict=True)
    return [float((x.float() - y.float()).norm() / x.float().norm()) for x, y in pairs]


def host_microseconds(kind, *geometry, calls=200, repeats=7):
    case = kind(1, 1, *geometry)
    functions = [f for f in (kind.theirs, kind.ours) if f is not None]
    times = []
    for _ in range(repeats):
        row = []
        for function in functions:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                case.run(function, 0, 0)
            row.append((time.perf_counter() - begin) / calls * 1e6)
        times.append(row)
    return [statistics.median(column) for column in zip(*times[1:], strict=True)]


def captured(case, function, layers):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.run(function, 0, 0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for step in range(case.steps):
                for layer in range(layers):
                    case.run(function, layer, step)
    return graph


def microseconds(graph):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000


def measure(kind, batch, *geometry, repeats=6):
    heads, dim, _, n, dtype = geometry
    layers = min(64, max(2, -(-220_000_000 // (batch * heads * dim * n * dtype.itemsize))))
    case = kind(batch, layers, *geometry)
    graphs = [captured(case, f, layers) for f in (kind.theirs, kind.ours) if f is not None]
    times = [[microseconds(graph) for graph in graphs] for _ in range(repeats)][1:]
    per_step = case.steps * layers
    return [statistics.median(column) / per_step for column in zip(*times, strict=True)]


CASES = {
    "mamba2 128x64x128 float32": (Mamba2Single, 128, 64, 8, 128, F32),
    "mamba2 128x64x128 bfloat16": (Mamba2Single, 128, 64, 8, 128, BF16),
    "mamba2 96x80x128 float32": (Mamba2Single, 96, 80, 8, 128, F32),
    "gated_delta 32x128x128 float32": (GatedDeltaSingle, 32, 128, 16, 128, F32),
    "gated_delta 32x128x128 bfloat16": (GatedDeltaSingle, 32, 128, 16, 128, BF16),
    "mamba2 window 5, 128x64x128 float32": (Mamba2Window, 128, 64, 8, 128, F32),
    "mamba2 window 5, 96x80x128 float32": (Mamba2Window, 96, 80, 8, 128, F32),
    "gated_delta window 5, 32x128x128 float32": (GatedDeltaWindow, 32, 128, 16, 128, F32),
    "gated_delta window 5, 32x128x128 bfloat16": (GatedDeltaWindow, 32, 128, 16, 128, BF16),
}


def arrows(numbers, form):
    return " -> ".join(form.format(x) for x in numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-sizes", default="1,8,32,128,256,512")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--times", type=int, default=6, help="repeats of a timing; 0: none")
    options = parser.parse_args()
    batches = [int(x) for x in options.batch_sizes.split(",")]
    for name, (kind, *geometry) in CASES.items():
        if options.only not in name:
            continue
        cells = []
        if kind.theirs is not None:
            apart = [distances(kind, batch, *geometry) for batch in batches]
            cells.append("apart " + " ".join(f"{max(x):.0e}" for x in zip(*apart, strict=True)))
        if options.times > 0:
            cells.append("host " + arrows(host_microseconds(kind, *geometry), "{:.0f}"))
            for batch in batches:
                times = measure(kind, batch, *geometry, repeats=options.times)
                cells.append(f"{batch}: " + arrows(times, "{:.1f}"))
                torch.cuda.empty_cache()
        print(f"{name:42s} " + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
