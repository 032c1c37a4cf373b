"""The native API against the recurrence in double: families, windows, trees, read copies."""

import pytest
import torch

import replayssm
from harness import BF16, F32, Random, assert_close, devices
from reference import double, normalised, per_head, softplus

FAMILIES = ("mamba2", "gated_delta", "kimi_delta")


class Model:
    """A layer, its inputs and its recurrence in double."""

    def __init__(self, family, device, window=1, act=F32, buffer_len=5, **options):
        self.geometry = replayssm.Recurrence(
            family, 4, 2, 16, 128, buffer_len=buffer_len, max_window=window, activation_dtype=act,
            **options,
        )  # fmt: skip
        self.random, self.act, self.device = Random(13, device), act, device
        self.slots, self.slot = 4, torch.tensor([2, 0, -1], dtype=torch.int32, device=device)
        self.state = self.geometry.state(self.slots, device)
        self.cursors = self.geometry.cursors(self.slots, device)
        r = self.random
        self.start = r.normal(self.slots, 4, 16, 128)
        self.state.load(self.start)
        self.exact = {s: double(self.state.checkpoint[s]) for s in (2, 0)}
        self.gate_scale, self.gate_bias = -r.uniform(4, low=0.1), r.normal(4, 128)

    def tokens(self, count):
        r, family = self.random, self.geometry.family
        x = {
            "v": r.normal(count, 4, 16, dtype=self.act),
            "k": r.normal(count, 2, 128, dtype=self.act),
            "q": r.normal(count, 2, 128, dtype=self.act),
            "b": r.uniform(count, 4),
        }
        if family == "kimi_delta":
            x["gate"] = r.normal(count, 4, 128, dtype=self.act)
        else:
            x["g"] = -r.uniform(count, 4)
        return x

    def token(self, state, x, t):
        """The recurrence over token t: new state and output."""
        k, q = double(x["k"][t]), double(x["q"][t])
        delta = self.geometry.family != "mamba2"
        if delta:
            k, q = normalised(k), normalised(q) * 128**-0.5
        k, q = per_head(k, 4), per_head(q, 4)
        if "gate" in x:
            raw = double(x["gate"][t]) + double(self.gate_bias)
            decay = torch.exp(double(self.gate_scale)[:, None] * softplus(raw))[:, None, :]
        else:
            decay = torch.exp(double(x["g"][t]))[:, None, None]
        state, v = state * decay, double(x["v"][t])
        if delta:
            v = v - torch.einsum("hvk,hk->hv", state, k)
        write = double(x["b"][t])[:, None] * v
        state = state + write[:, :, None] * k[:, None, :]
        return state, torch.einsum("hvk,hk->hv", state, q)

    def step(self, x, starts, parent=None, **options):
        query_start = torch.tensor(starts, dtype=torch.int32, device=self.device)
        if "gate" in x:
            options |= {"gate_scale": self.gate_scale, "gate_bias": self.gate_bias}
        if parent is not None:
            options["parent"] = torch.tensor(parent, dtype=torch.int32, device=self.device)
        self.cursors.begin(self.slot, query_start)
        return self.geometry.step(
            self.state, self.cursors, **x, slot=self.slot, query_start=query_start, **options
        )

    def commit(self, accepted):
        self.cursors.commit(
            self.slot, torch.tensor(accepted, dtype=torch.int32, device=self.device)
        )


def close(actual, expected, act=F32):
    """Sums of some hundred terms, each of the order of one."""
    assert_close("o", actual, expected, expected.abs().amax() + 10, 1000 if act == F32 else 5000)


@devices
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("route", ["output_only", "state_and_output"])
def test_single_tokens(device, family, route):
    model = Model(family, device)
    for _ in range(13):
        x = model.tokens(3)
        o = model.step(x, [0, 1, 2, 3], route=route)
        for i, slot in enumerate((2, 0)):
            model.exact[slot], want = model.token(model.exact[slot], x, i)
            close(o[i], want)
        assert (o[2] == 0).all()
        model.commit([1, 1, 0])
    options = {}
    if family == "kimi_delta":
        options = {"gate_scale": model.gate_scale, "gate_bias": model.gate_bias}
    model.geometry.fold(model.state, model.cursors, slot=model.slot, **options)
    model.cursors.folded(model.slot)
    for slot in (2, 0):
        close(model.state.checkpoint[slot], model.exact[slot])


@devices
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_and_rejection(device, family):
    model = Model(family, device, window=3)
    for step in range(9):
        x = model.tokens(6)
        o = model.step(x, [0, 3, 5, 6])
        for slot, first, last, accepted in ((2, 0, 3, 1 + step % 3), (0, 3, 5, step % 3)):
            state = model.exact[slot]
            for n, t in enumerate(range(first, last)):
                state, want = model.token(state, x, t)
                close(o[t], want)
                if n + 1 == accepted:
                    model.exact[slot] = state
        model.commit([1 + step % 3, step % 3, 0])


@devices
@pytest.mark.parametrize("family", FAMILIES)
def test_trees(device, family):
    model, parents = Model(family, device, window=4), [-1, 0, 0, 1]
    x = model.tokens(8)
    o = model.step(x, [0, 4, 8, 8], parent=parents * 2)
    for i, slot in enumerate((2, 0)):
        states = {-1: model.exact[slot]}
        for t, parent in enumerate(parents):
            states[t], want = model.token(states[parent], x, 4 * i + t)
            close(o[4 * i + t], want)


@devices
@pytest.mark.parametrize("dtype,bits", [(torch.float8_e4m3fn, 4), (torch.int8, 8)])
def test_read_copies_do_not_enter_the_recurrence(device, dtype, bits):
    exact, rounded = Model("gated_delta", device), Model("gated_delta", device, read_dtype=dtype)
    for step in range(12):
        x = exact.tokens(3)
        o, near = exact.step(x, [0, 1, 2, 3]), rounded.step(x, [0, 1, 2, 3])
        error = (o[:2] - near[:2]).abs().max()
        assert error < 2.0**-bits * 8 and (step > 3 or error > 0)
        exact.commit([1, 1, 0]), rounded.commit([1, 1, 0])
    assert torch.equal(exact.state.checkpoint, rounded.state.checkpoint)


@devices
def test_bf16_activations_and_dlpack(device):
    """Objects that are no tensors, but export their memory."""

    class Exported:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    model = Model("mamba2", device, act=BF16)
    x = model.tokens(3)
    o = model.step({name: Exported(value) for name, value in x.items()}, [0, 1, 2, 3])
    for i, slot in enumerate((2, 0)):
        close(o[i], model.token(model.exact[slot], x, i)[1], BF16)
    assert o.dtype == BF16


@pytest.mark.parametrize(
    "change,message",
    [
        ({"g": None}, "g: expected a tensor for mamba2, got None"),
        ({"v": torch.zeros(3, 4, 8)}, r"v: expected shape \(3, 4, 16\), got \(3, 4, 8\)"),
        ({"k": torch.zeros(3, 2, 128, dtype=BF16)}, "k: expected dtype torch.float32, got"),
        ({"b": torch.zeros(4, 3).T}, "b: expected a contiguous tensor, got"),
        ({"route": "both"}, "route: expected conventional or state_and_output or output_only"),
    ],
)
def test_bad_arguments(change, message):
    model = Model("mamba2", "cpu")
    with pytest.raises(ValueError, match=message):
        x = model.tokens(3) | change if "route" not in change else model.tokens(3)
        model.step(x, [0, 1, 2, 3], **{k: v for k, v in change.items() if k == "route"})


def test_bad_geometry():
    with pytest.raises(ValueError, match="key_heads: expected a divisor of heads 4, got 3"):
        replayssm.Recurrence("mamba2", 4, 3, 16, 128)
    with pytest.raises(ValueError, match="family: expected mamba2 or gated_delta or kimi_delta"):
        replayssm.Recurrence("mamba", 4, 2, 16, 128)
