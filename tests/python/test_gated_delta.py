"""Gated Delta's drop-in functions against the recurrence in double, step by step."""

import pytest
import torch

import replayssm
from harness import BF16, DEVICES, F32, Random, assert_close, assert_same, devices, dtypes, poisoned
from reference import GatedDelta, Numbers, double, split_qkv

SHAPES = {  # heads, dim, key_heads, state_dim
    "qwen": (4, 128, 2, 128),
    "square": (2, 64, 2, 64),
    "odd": (3, 10, 1, 20),
}
PADDING = (0, -1)


class Layer:
    """Constants of a layer and its pages, NaN where nothing may be read."""

    def __init__(self, seed, device, act, state, shape, ring, batch, l2norm):
        self.random = r = Random(seed, device)
        self.heads, self.dim, self.key_heads, self.n = shape
        self.act, self.ring, self.batch, self.l2norm = act, ring, batch, l2norm
        self.A_log, self.dt_bias = r.normal(self.heads), r.normal(self.heads, dtype=act)
        self.scale = self.n**-0.5
        self.slots = r.permutation(batch + 2)[:batch].to(torch.int32) + 1
        slots, live = batch + 3, self.slots.long()
        paged = r.normal(slots, 2, self.heads, self.dim, self.n).to(state)[:, 0]  # not contiguous
        self.state = paged
        self.state[:] = float("nan")
        self.state[live] = r.normal(batch, *self.state.shape[1:], scale=0.5).to(state)

        def make(*shape, dtype):
            return poisoned(slots, *shape, dtype=dtype, device=device)

        self.d_cache = make(self.heads, ring, self.dim, dtype=act)
        self.k_cache = make(self.key_heads, ring, self.n, dtype=act)
        self.g_cache = make(self.heads, ring, dtype=F32)
        self.constants = GatedDelta(self.A_log, self.dt_bias, self.scale, l2norm)

    def pages(self):
        return [t.clone() for t in (self.state, self.d_cache, self.k_cache, self.g_cache)]

    def fill(self, slot, count):
        r = self.random
        self.d_cache[slot, :, :count] = r.normal(self.heads, count, self.dim, dtype=self.act)
        keys = torch.nn.functional.normalize(r.normal(self.key_heads, count, self.n), dim=-1)
        self.k_cache[slot, :, :count] = keys.to(self.act)
        self.g_cache[slot, :, :count] = -r.uniform(self.heads, count, high=0.5)

    def tokens(self, total):
        r, width = self.random, 2 * self.key_heads * self.n + self.heads * self.dim
        scale = 1.0 if self.l2norm else self.n**-0.5
        mixed = r.normal(total, width + 8, dtype=self.act)[:, :width]
        mixed[:, : 2 * self.key_heads * self.n] *= scale
        return (
            mixed,
            r.normal(total, self.heads, dtype=self.act),
            r.normal(total, self.heads, dtype=self.act),
        )

    def expect(self, pages, cursor, window, tokens, i, numbers, keys=None):
        """Row i in double: outputs, d and log decays of its window, states before and after it.

        keys: the window's keys as they were cached, instead of the exact ones.
        """
        state, d_cache, k_cache, g_cache = pages
        (write_pos, origin), (mixed, a, b) = cursor, tokens
        slot, m = int(self.slots[i]), self.constants
        q, k, v = split_qkv(mixed, self.heads, self.dim, self.key_heads, self.n)
        s = numbers.of(state[slot])
        for j in range(write_pos):
            at = (origin + j) % self.ring
            s = m.row(
                s, double(g_cache[slot, :, at]), d_cache[slot, :, at], k_cache[slot, :, at], numbers
            )
        before, outs, ds, gs, exact = s, [], [], [], []
        for n, t in enumerate(window):
            exact.append(m.vector(k[t]))
            key = exact[-1] if keys is None else double(keys[n])
            g = m.log_decay(a[t])
            beta = torch.sigmoid(double(b[t]))
            s, d, o = m.token(s, g, beta, v[t], key, m.vector(q[t]), numbers)
            outs.append(o), ds.append(d), gs.append(g)
        return outs, ds, gs, exact, before, s


def check_tokens(layer, out, pages, slot, places, expected, sizes, terms):
    """What a window must leave in the caches; returns its cached keys."""
    (outs, ds, gs, keys, _, _), (out_sizes, d_sizes, _, _, _, _) = expected, sizes
    _, d_cache, k_cache, g_cache = pages
    for n, place in enumerate(places):
        assert_close("out", out[n], outs[n], out_sizes[n], terms)
        assert_close("d_cache", d_cache[slot, :, place], ds[n], d_sizes[n], terms)
        assert_close("k_cache", k_cache[slot, :, place], keys[n], keys[n].abs() + 1e-3, layer.n)
        assert_close("g_cache", g_cache[slot, :, place], gs[n], gs[n].abs(), 32)


def run_single(device, act, state, shape, ring=8, steps=10, batch=3, l2norm=True):
    layer = Layer(7, device, act, state, shape, ring, batch, l2norm)
    write_pos = torch.tensor([0, ring // 2, ring - 1] * batch, dtype=torch.int32)[:batch]
    for slot, count in zip(layer.slots.tolist(), write_pos.tolist(), strict=True):
        layer.fill(slot, count)
    padding = torch.tensor(PADDING, dtype=torch.int32)
    indices = torch.cat([layer.slots, padding]).to(device)
    terms = 4 * layer.n + 6 * ring
    for _ in range(steps):
        tokens = layer.tokens(batch + 2)
        before = layer.pages()
        out = poisoned(batch + 2, 1, layer.heads, layer.dim, dtype=act, device=device)
        positions = torch.cat([write_pos, torch.zeros(2, dtype=torch.int32)]).to(device)
        result, same_state = replayssm.fused_recurrent_gated_delta_rule_replayssm(
            *tokens, layer.A_log, layer.dt_bias, layer.scale, layer.state, layer.d_cache,
            layer.k_cache, layer.g_cache, out, indices, positions,
            use_qk_l2norm_in_kernel=l2norm,
        )  # fmt: skip
        assert result is out and same_state is layer.state
        assert (out[batch:] == 0).all(), "a padded row's output must be zero"
        expected = [t.clone() for t in before]
        after = layer.pages()
        for i in range(batch):
            slot, w = int(layer.slots[i]), int(write_pos[i])
            arguments = (before, (w, 0), range(i, i + 1), tokens, i)
            want = layer.expect(*arguments, Numbers(False))
            size = layer.expect(*arguments, Numbers(True))
            assert_close("out", out[i, 0], want[0][0], size[0][0], terms)
            if w == ring - 1:
                assert_close("state", layer.state[slot], want[5], size[5], terms)
                expected[0][slot] = layer.state[slot]
            else:
                check_tokens(layer, out[i], after, slot, [w], want, size, terms)
                for n in (1, 2, 3):
                    expected[n][slot, :, w] = after[n][slot, :, w]
        for name, now, then in zip(("state", "d", "k", "g"), after, expected, strict=True):
            assert_same(name, now, then)
        write_pos = torch.where(write_pos == ring - 1, 0, write_pos + 1).to(torch.int32)


@devices
@dtypes
def test_single_dtypes(device, act, state):
    run_single(device, act, state, SHAPES["qwen"])


@devices
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("l2norm", [True, False])
def test_single_shapes(device, shape, l2norm):
    run_single(device, BF16, F32, SHAPES[shape], steps=9, l2norm=l2norm)


@devices
@pytest.mark.parametrize("ring", [1, 2, 16, 40])
def test_single_ring_lengths(device, ring):
    run_single(device, F32, F32, SHAPES["qwen"], ring=ring, steps=3)


def run_window(device, act, state, shape, spec=4, threshold=12, steps=8, batch=2, l2norm=True,
               modes=("both",)):  # fmt: skip
    ring = 1 << (threshold - 1).bit_length()
    layer = Layer(11, device, act, state, shape, ring, batch, l2norm)
    r, slots = layer.random, batch + 3
    write_pos, origin = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(2))
    is_flush = torch.zeros(slots, dtype=torch.int8, device=device)
    origin[layer.slots.long()] = (torch.arange(batch, dtype=torch.int32) * 5 % ring).to(device)
    padding = torch.tensor(PADDING, dtype=torch.int32)
    indices = torch.cat([layer.slots, padding]).to(device)
    replayssm.reset_gdn_replayssm_spec_cursors(
        write_pos, origin, is_flush, torch.zeros_like(indices), indices, threshold, spec
    )
    is_flush[layer.slots.long()] = 2 * spec > threshold
    terms, flushed = 4 * layer.n + 8 * ring, 0
    for _ in range(steps):
        lengths = [int(v) for v in r.integers(1, spec + 1, batch)] + [min(2, spec), 1]
        starts = [0] + [sum(lengths[: i + 1]) for i in range(batch + 2)]
        tokens = layer.tokens(starts[-1])
        before = layer.pages()
        cursors = [
            (int(write_pos[s]), int(origin[s]), int(is_flush[s])) for s in layer.slots.tolist()
        ]
        out = poisoned(starts[-1], layer.heads, layer.dim, dtype=act, device=device)
        for mode in modes:
            replayssm.gdn_replayssm_spec_decode(
                *tokens, layer.A_log, layer.dt_bias, layer.state, layer.d_cache, layer.k_cache,
                layer.g_cache, out, torch.tensor(starts, dtype=torch.int32, device=device),
                indices, write_pos, origin, is_flush, threshold, spec,
                use_qk_l2norm_in_kernel=l2norm, launch_mode=mode,
            )  # fmt: skip
        assert (out[starts[batch] :] == 0).all(), "a padded row's output must be zero"
        expected, after = [t.clone() for t in before], layer.pages()
        for i in range(batch):
            slot, (w, o, f) = int(layer.slots[i]), cursors[i]
            window = range(starts[i], starts[i + 1])
            places = [(o + w + n) % ring for n in range(len(window))]
            keys = [after[2][slot, :, place] for place in places]
            arguments = (before, (w, o), window, tokens, i)
            want = layer.expect(*arguments, Numbers(False), keys)
            size = layer.expect(*arguments, Numbers(True), keys)
            check_tokens(layer, out[window], after, slot, places, want, size, terms)
            if f and w > 0:
                assert_close("state", layer.state[slot], want[4], size[4], terms)
                expected[0][slot] = layer.state[slot]
                flushed += 1
            for n in (1, 2, 3):
                expected[n][slot, :, places] = after[n][slot, :, places]
        for name, now, then in zip(("state", "d", "k", "g"), after, expected, strict=True):
            assert_same(name, now, then)
        accepted = torch.tensor([1 + int(r.integers(0, n, 1)) for n in lengths], device=device)
        replayssm.commit_gdn_replayssm_spec(
            write_pos, origin, is_flush, accepted, indices, threshold, spec, cache_buf_len=ring
        )
        for (w, o, f), a, s in zip(cursors, accepted, layer.slots.tolist(), strict=False):
            want_pos, want_origin = (int(a), (o + w) % ring) if f else (w + int(a), o)
            assert (int(write_pos[s]), int(origin[s])) == (want_pos, want_origin)
            assert int(is_flush[s]) == (want_pos + 2 * spec > threshold)
    assert flushed > 0


@devices
@dtypes
def test_window_dtypes(device, act, state):
    run_window(device, act, state, SHAPES["qwen"])


@devices
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("l2norm", [True, False])
def test_window_shapes(device, shape, l2norm):
    run_window(device, BF16, F32, SHAPES[shape], l2norm=l2norm)


@devices
@pytest.mark.parametrize("spec,threshold", [(1, 8), (5, 21), (8, 24), (12, 32), (16, 32)])
def test_window_lengths(device, spec, threshold):
    run_window(device, F32, F32, (2, 128, 1, 128), spec, threshold, 3 * threshold // spec + 2)


@devices
def test_two_launches_are_one(device):
    run_window(device, BF16, F32, SHAPES["qwen"], modes=("verify", "flush"))


@pytest.mark.skipif(DEVICES == ["cpu"], reason="there is no GPU")
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("state", [F32, BF16])
def test_large_batches_on_both_devices(window, state):
    """Pieces of several passes: batches that a test in double would take minutes for."""
    batch, shape, ring = 64, (16, 128, 8, 128), 32 if window else 16
    layer = Layer(5, "cpu", BF16, state, shape, ring, batch, True)
    for slot in layer.slots.tolist():
        layer.fill(slot, ring)
    count = torch.arange(batch, dtype=torch.int32) % (12 if window else ring)
    tokens = layer.tokens(batch * max(window, 1))
    pages = [x.contiguous() for x in layer.pages()]
    results = []
    for device in DEVICES:
        state, *caches = (x.to(device).clone() for x in pages)
        a_log, bias, slots = (x.to(device) for x in (layer.A_log, layer.dt_bias, layer.slots))
        mixed, a, b = (x.to(device) for x in tokens)
        out = torch.zeros(mixed.shape[0], *shape[:2], dtype=BF16, device=device)
        if window:
            by_slot = torch.zeros(3, batch + 3, dtype=torch.int32)
            by_slot[0, layer.slots.long()] = count
            by_slot[1:, layer.slots.long()] = torch.stack([count * 7 % ring, count % 2])
            cursors = [by_slot[0].to(device), by_slot[1].to(device), by_slot[2].bool().to(device)]
            starts = torch.arange(0, batch * window + 1, window, dtype=torch.int32, device=device)
            replayssm.gdn_replayssm_spec_decode(
                mixed, a, b, a_log, bias, state, *caches, out, starts, slots, *cursors, 21, window
            )
        else:
            replayssm.fused_recurrent_gated_delta_rule_replayssm(
                mixed, a, b, a_log, bias, layer.scale, state, *caches, out, slots,
                count.to(device), use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        results.append([x.float().cpu() for x in (out, state[slots.long()], *caches)])
    for cpu, cuda in zip(*results, strict=True):
        cpu, cuda = cpu.nan_to_num(), cuda.nan_to_num()
        assert (cpu - cuda).norm() < 2e-3 * cpu.norm()
