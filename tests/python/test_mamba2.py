"""Mamba-2's drop-in functions against the recurrence in double, step by step."""

import pytest
import torch

import replayssm
from harness import BF16, F32, NAN, Random, assert_close, assert_same, devices, dtypes
from harness import poisoned
from reference import Mamba2, Numbers, double

SHAPES = {  # heads, dim, groups, state_dim
    "nemotron": (8, 64, 2, 128),
    "dim80": (4, 80, 1, 128),
    "state256": (2, 64, 1, 256),
    "odd": (3, 10, 1, 20),
}
ROUTES = {
    "output_only": replayssm.selective_state_update_replayssm_output_only,
    "state_and_output": replayssm.selective_state_update_replayssm_state_and_output,
}
PADDING = 0


class Layer:
    """Constants of a layer and its pages, NaN where nothing may be read."""

    def __init__(self, seed, device, act, state, shape, ring, batch, single, extras=True):
        self.random = r = Random(seed, device)
        self.heads, self.dim, self.groups, self.n = shape
        self.act, self.ring, self.batch, self.device = act, ring, batch, device
        heads, dim, n, slots = self.heads, self.dim, self.n, batch + 3
        self.A = -r.uniform(heads, low=0.2, high=4.0)
        self.dt_bias = r.normal(heads, dtype=act) if extras else None
        self.D = r.normal(heads, dtype=act) if extras else None
        self.slots = r.permutation(slots - 1)[:batch].to(torch.int32) + 1
        self.state = poisoned(slots, heads, dim, n, dtype=state, device=device)
        self.state[self.slots.long()] = r.normal(batch, heads, dim, n).to(state)
        page = (slots, heads, ring, dim) if single else (slots, ring, heads * dim + self.groups * n)
        self.x_cache = poisoned(*page, dtype=act, device=device)
        self.B_cache = poisoned(slots, self.groups, ring, n, dtype=act, device=device)
        self.dt_cache = poisoned(slots, heads, ring, dtype=F32, device=device)
        self.constants = Mamba2(
            self.A, None if self.D is None else self.D[:, None].expand(-1, dim), self.dt_bias, True
        )

    def tied(self, x, *sizes):
        return None if x is None else x.reshape(-1, *([1] * len(sizes))).expand(-1, *sizes)

    def pages(self):
        return [t.clone() for t in (self.state, self.x_cache, self.dt_cache, self.B_cache)]


def expect_single(layer, pages, write_pos, flush, x, dt, b, c, z, i, numbers):
    """Row i in double: out, state, time step."""
    state, x_cache, dt_cache, b_cache = pages
    slot = int(layer.slots[i])
    s, m = numbers.of(state[slot]), layer.constants
    for j in range(write_pos):
        row_dt = double(dt_cache[slot, :, j])
        s = m.row(s, row_dt, x_cache[slot, :, j], b_cache[slot, :, j], numbers)
    step = m.time_step(dt[i])
    s = m.row(s, step, x[i], b[i], numbers)
    return m.read(s, x[i], c[i], None if z is None else z[i], numbers), s, step


def run_single(route, device, act, state, shape, ring=8, steps=20, batch=3, extras=True):
    layer = Layer(7, device, act, state, shape, ring, batch, True, extras)
    r, (heads, dim, groups, n) = layer.random, shape
    write_pos = torch.tensor([0, ring // 2, ring - 1] * batch, dtype=torch.int32)[: batch + 1]
    # What rows before the start hold.
    for i in range(batch):
        slot, count = int(layer.slots[i]), int(write_pos[i])
        layer.x_cache[slot, :, :count] = r.normal(heads, count, dim, dtype=act)
        layer.B_cache[slot, :, :count] = r.normal(groups, count, n, dtype=act)
        layer.dt_cache[slot, :, :count] = r.uniform(heads, count, low=0.01, high=1.0)
    indices = torch.cat([layer.slots, torch.tensor([PADDING], dtype=torch.int32)]).to(device)
    terms = 3 * n + 4 * ring
    for _ in range(steps):
        flush = write_pos == ring - 1
        x = r.normal(batch + 1, heads, dim, dtype=act)
        dt = r.normal(batch + 1, heads, dtype=act)
        b, c = (r.normal(batch + 1, groups, n, dtype=act) for _ in range(2))
        z = r.normal(batch + 1, heads, dim, dtype=act) if extras else None
        before = layer.pages()
        out = poisoned(batch + 1, heads, dim, dtype=act, device=device)
        result = ROUTES[route](
            layer.state, x, dt[:, :, None].expand(-1, -1, dim), layer.tied(layer.A, dim, n), b, c,
            D=layer.tied(layer.D, dim), z=z, dt_bias=layer.tied(layer.dt_bias, dim),
            dt_softplus=True, x_cache=layer.x_cache, dt_cache=layer.dt_cache,
            B_cache=layer.B_cache, write_pos=write_pos.to(device), is_flush=flush.to(device),
            max_cache_len=ring, state_batch_indices=indices, out=out,
        )  # fmt: skip
        assert result is out or result.data_ptr() == out.data_ptr()
        assert out[batch].isnan().all(), "a padded row's output was written"
        expected = [t.clone() for t in before]
        for i in range(batch):
            slot, w = int(layer.slots[i]), int(write_pos[i])
            arguments = (layer, before, w, bool(flush[i]), x, dt, b, c, z, i)
            want, state_want, step = expect_single(*arguments, Numbers(False))
            size, state_size, _ = expect_single(*arguments, Numbers(True))
            assert_close("out", out[i], want, size, terms)
            if flush[i]:
                assert_close("state", layer.state[slot], state_want, state_size, terms)
                expected[0][slot] = layer.state[slot]
            else:
                assert_close("dt_cache", layer.dt_cache[slot, :, w], step, step.abs(), 16)
                expected[1][slot, :, w] = x[i]
                expected[2][slot, :, w] = layer.dt_cache[slot, :, w]
                expected[3][slot, :, w] = b[i]
        names = ("state", "x_cache", "dt_cache", "B_cache")
        for name, now, then in zip(names, layer.pages(), expected, strict=True):
            assert_same(name, now, then)
        write_pos = torch.where(flush, 0, write_pos + 1).to(torch.int32)
        write_pos[batch] = 0


@devices
@dtypes
@pytest.mark.parametrize("route", ROUTES)
def test_single_dtypes(device, act, state, route):
    run_single(route, device, act, state, SHAPES["nemotron"])


@devices
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extras", [True, False])
def test_single_shapes(device, shape, extras):
    run_single("output_only", device, BF16, F32, SHAPES[shape], steps=9, extras=extras)


@devices
@pytest.mark.parametrize("ring", [1, 2, 16, 40])
def test_single_ring_lengths(device, ring):
    run_single("output_only", device, F32, F32, SHAPES["nemotron"], ring=ring, steps=4)


def expect_window(layer, pages, cursor, window, tokens, i, numbers):
    """Row i in double: outputs of its window, the state after its cached rows."""
    state, cache, dt_cache, _ = pages
    (write_pos, origin), (x, b, c, dt, z) = cursor, tokens
    slot, m = int(layer.slots[i]), layer.constants
    s = numbers.of(state[slot])
    inner = layer.heads * layer.dim
    for j in range(write_pos):
        row = cache[slot, (origin + j) % layer.ring]
        xs, bs = row[:inner].view(layer.heads, -1), row[inner:].view(layer.groups, -1)
        step = m.time_step(dt_cache[slot, :, (origin + j) % layer.ring])
        s = m.row(s, step, xs, bs, numbers)
    folded, outs = s, []
    for t in window:
        s = m.row(s, m.time_step(dt[t]), x[t], b[t], numbers)
        outs.append(m.read(s, x[t], c[t], None if z is None else z[t], numbers))
    return outs, folded


def commit_and_check(layer, tensors, before, accepted, indices, threshold, spec):
    write_pos, origin, is_flush = tensors
    count = torch.tensor(accepted, dtype=torch.int32, device=layer.device)
    replayssm.commit_replayssm_spec(*tensors, count, indices, threshold, spec)
    for (w, o, f), a, s in zip(before, accepted, layer.slots.tolist(), strict=False):
        want_pos, want_origin = (a, (o + w) % layer.ring) if f else (w + a, o)
        assert (int(write_pos[s]), int(origin[s])) == (want_pos, want_origin)
        assert int(is_flush[s]) == (want_pos + 2 * spec > threshold)
    assert int(write_pos[PADDING]) == 0


def run_window(device, act, state, shape, spec=4, threshold=12, steps=14, batch=3, extras=True):
    ring = 1 << (threshold - 1).bit_length()
    layer = Layer(11, device, act, state, shape, ring, batch, False, extras)
    r, (heads, dim, groups, n), slots = layer.random, shape, batch + 3
    inner, keys = heads * dim, groups * n
    write_pos, origin = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(2))
    is_flush = torch.zeros(slots, dtype=torch.int8, device=device)
    origin[layer.slots.long()] = (torch.arange(batch, dtype=torch.int32) * 5 % ring).to(device)
    is_flush[layer.slots.long()] = 2 * spec > threshold
    indices = torch.cat([layer.slots, torch.tensor([PADDING], dtype=torch.int32)]).to(device)
    terms = 3 * n + 6 * ring
    flushed = wrapped = 0
    for step in range(steps):
        lengths = [int(v) for v in r.integers(1, spec + 1, batch)] + [min(2, spec)]
        starts = [0] + [sum(lengths[: i + 1]) for i in range(batch + 1)]
        total = starts[-1]
        conv_out = r.normal(total, inner + 2 * keys + 8, dtype=act)[:, : inner + 2 * keys]
        dt = r.normal(total, heads, dtype=act)
        z = r.normal(total, heads, dim, dtype=act) if extras else None
        before = layer.pages()
        cursors = [
            (int(write_pos[s]), int(origin[s]), int(is_flush[s])) for s in layer.slots.tolist()
        ]
        out = poisoned(total, heads, dim, dtype=act, device=device)
        replayssm.selective_state_update_replayssm_spec(
            layer.state, layer.x_cache, layer.dt_cache, conv_out, dt,
            layer.tied(layer.A, dim, n), write_pos, origin, is_flush,
            torch.tensor(starts, dtype=torch.int32, device=device), indices, threshold, spec,
            inner, groups, n, D=layer.tied(layer.D, dim), z=z,
            dt_bias=layer.tied(layer.dt_bias, dim), dt_softplus=True, out=out,
        )  # fmt: skip
        x = conv_out[:, :inner].view(total, heads, dim) if total else None
        b, c = (
            conv_out[:, inner + k * keys : inner + (k + 1) * keys].unflatten(-1, (groups, n))
            for k in range(2)
        )
        assert out[starts[batch] :].isnan().all(), "a padded row's output was written"
        expected = [t.clone() for t in before]
        for i in range(batch):
            slot, (w, o, f) = int(layer.slots[i]), cursors[i]
            window = range(starts[i], starts[i + 1])
            tokens = (x, b, c, dt, z)
            outs, folded = expect_window(layer, before, (w, o), window, tokens, i, Numbers(False))
            sizes, size = expect_window(layer, before, (w, o), window, tokens, i, Numbers(True))
            for t, want, bound in zip(window, outs, sizes, strict=True):
                assert_close(f"out of step {step}", out[t], want, bound, terms)
            if f and w > 0:
                assert_close("state", layer.state[slot], folded, size, terms)
                expected[0][slot] = layer.state[slot]
                flushed += 1
            for n_row, t in enumerate(window):
                place = (o + w + n_row) % ring
                wrapped += place < o
                expected[1][slot, place] = conv_out[t, : inner + keys]
                expected[2][slot, :, place] = dt[t].float()
        names = ("state", "post_conv_cache", "dt_cache", "unused")
        for name, now, then in zip(names, layer.pages(), expected, strict=True):
            assert_same(name, now, then)
        accepted = [1 + int(r.integers(0, n_row, 1)) for n_row in lengths]
        commit_and_check(
            layer, (write_pos, origin, is_flush), cursors, accepted, indices, threshold, spec
        )
    assert flushed > 0 and (wrapped > 0 or threshold < ring)


@devices
@dtypes
def test_window_dtypes(device, act, state):
    run_window(device, act, state, SHAPES["nemotron"])


@devices
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extras", [True, False])
def test_window_shapes(device, shape, extras):
    run_window(device, BF16, F32, SHAPES[shape], steps=10, extras=extras)


@devices
@pytest.mark.parametrize("spec,threshold", [(1, 8), (5, 21), (8, 24), (12, 32), (16, 32), (8, 64)])
def test_window_lengths(device, spec, threshold):
    steps = 3 * threshold // spec + 4
    run_window(device, BF16, F32, (2, 64, 1, 128), spec, threshold, steps)


@devices
def test_strong_decays_stay_finite(device):
    """Sums of log decays in the thousands: the newest rows keep their weight."""
    layer = Layer(3, device, F32, F32, (2, 64, 1, 128), 16, 1, True, False)
    layer.A.fill_(-400.0)
    layer.constants.A = double(layer.A)
    r, slot = layer.random, int(layer.slots[0])
    layer.x_cache[slot] = r.normal(2, 16, 64)
    layer.B_cache[slot] = r.normal(1, 16, 128)
    layer.dt_cache[slot] = 5.0
    layer.dt_cache[slot, :, 13:] = 1e-4
    x, b, c = r.normal(1, 2, 64), r.normal(1, 1, 128), r.normal(1, 1, 128)
    dt = torch.full((1, 2), -9.0, device=device)
    for write_pos in (15, 14):
        before = layer.pages()
        flush = write_pos == 15
        out = ROUTES["output_only"](
            layer.state, x, dt[:, :, None].expand(-1, -1, 64), layer.tied(layer.A, 64, 128), b, c,
            dt_softplus=True, x_cache=layer.x_cache, dt_cache=layer.dt_cache,
            B_cache=layer.B_cache,
            write_pos=torch.tensor([write_pos], dtype=torch.int32).to(device),
            is_flush=torch.tensor([flush]).to(device), max_cache_len=16,
            state_batch_indices=layer.slots.to(device), out=torch.full_like(x, NAN),
        )  # fmt: skip
        arguments = (layer, before, write_pos, flush, x, dt, b, c, None, 0)
        want, _, _ = expect_single(*arguments, Numbers(False))
        size, _, _ = expect_single(*arguments, Numbers(True))
        assert_close("out", out[0], want, size, 600)


@devices
def test_without_heads_and_indices(device):
    """A layer without heads; row i of the batch is slot i."""
    r, dim, n, ring = Random(5, device), 64, 128, 4
    state = r.normal(2, dim, n)
    pages = {
        "x_cache": torch.zeros(2, 1, ring, dim, device=device),
        "dt_cache": torch.zeros(2, 1, ring, device=device),
        "B_cache": torch.zeros(2, 1, ring, n, device=device),
    }
    x, b, c, dt = r.normal(2, dim), r.normal(2, n), r.normal(2, n), r.uniform(2)
    a = torch.full((1,), -0.5, device=device)
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    out = ROUTES["output_only"](
        state, x, dt[:, None].expand(-1, dim), a[:, None].expand(dim, n), b, c, **pages,
        write_pos=zeros, is_flush=zeros.to(torch.int8), max_cache_len=ring,
    )  # fmt: skip
    assert out.shape == (2, dim)
    s = torch.exp(-0.5 * double(dt))[:, None, None] * double(state)
    s = s + double(dt)[:, None, None] * double(x)[:, :, None] * double(b)[:, None, :]
    want = torch.einsum("bpn,bn->bp", s, double(c))
    assert_close("out", out, want, want.abs() + 100, 200)


@devices
@pytest.mark.parametrize("accepted", [0, 2])
def test_commit_of_a_flush_without_acceptance_drops_the_history(device, accepted):
    write_pos, origin = (torch.tensor([0, v], dtype=torch.int32, device=device) for v in (7, 3))
    is_flush = torch.tensor([0, 1], dtype=torch.int8, device=device)
    index = torch.tensor([1], dtype=torch.int32, device=device)
    count = torch.tensor([accepted], dtype=torch.int32, device=device)
    replayssm.commit_replayssm_spec(write_pos, origin, is_flush, count, index, 8, 2)
    assert (write_pos.tolist(), origin.tolist()) == ([0, accepted], [0, (3 + 7) % 8])
    assert is_flush.tolist() == [0, 0]


@devices
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int32])
def test_reset_takes_marked_rows_alone(device, dtype):
    write_pos, origin = (torch.full((4,), 5, dtype=torch.int32, device=device) for _ in range(2))
    is_flush = torch.zeros(4, dtype=torch.int8, device=device)
    indices = torch.tensor([2, 1, 0, 0], dtype=torch.int32, device=device)
    first = torch.tensor([1, 0, 1, 1], device=device).to(dtype)
    replayssm.reset_replayssm_spec_cursors(write_pos, origin, is_flush, first, indices, 7, 4)
    assert write_pos.tolist() == origin.tolist() == [5, 5, 0, 5]
    assert is_flush.tolist() == [0, 0, 1, 0]
