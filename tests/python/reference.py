"""The published decode functions in double precision: each is the recurrence, token by token.

A step takes the caches as they are and returns what they, the state and the output must become.
`magnitude` runs the same sums over absolute values: what rounding errors are relative to.
"""

import torch

L2_EPS = 1e-6


def double(x):
    return None if x is None else x.detach().cpu().double()


class Numbers:
    """Arithmetic on values, or on their magnitudes."""

    def __init__(self, magnitude):
        self.magnitude = magnitude

    def of(self, x):
        x = double(x)
        return x.abs() if self.magnitude and x is not None else x

    def minus(self, x, y):
        return x + y if self.magnitude else x - y


def softplus(x):
    return torch.where(x <= 20.0, torch.log1p(torch.exp(x)), x)


def silu(x):
    return x * torch.sigmoid(x)


def normalised(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def per_head(x, heads):
    """[groups, n] repeated for the heads of each group."""
    return x.repeat_interleave(heads // x.shape[0], dim=0)


def advance(state, decay, weight, v, k):
    """[heads, dim, n]: one row of the recurrence without correction."""
    return decay[:, None, None] * state + (weight[:, None] * v)[:, :, None] * k[:, None, :]


class Mamba2:
    """Geometry and constants: A, D, dt_bias are [heads, ...] as given, one value per head."""

    def __init__(self, A, D, dt_bias, softplus):
        self.A, self.D, self.dt_bias = double(A), double(D), double(dt_bias)
        self.softplus = softplus

    def time_step(self, raw):
        dt = double(raw)
        if self.dt_bias is not None:
            dt = dt + self.dt_bias
        return softplus(dt) if self.softplus else dt

    def read(self, state, x, c, z, numbers):
        heads = state.shape[0]
        out = torch.einsum("hpn,hn->hp", state, per_head(numbers.of(c), heads))
        if self.D is not None:
            out = out + numbers.of(x) * numbers.of(self.D)
        if z is not None:
            gate = silu(double(z))
            out = out * (gate.abs() if numbers.magnitude else gate)
        return out

    def row(self, state, dt, x, b, numbers):
        keys = per_head(numbers.of(b), state.shape[0])
        return advance(state, torch.exp(self.A * dt), dt, numbers.of(x), keys)


class GatedDelta:
    def __init__(self, A_log, dt_bias, scale, l2norm):
        self.A_log, self.dt_bias = double(A_log), double(dt_bias)
        self.scale, self.l2norm = scale, l2norm

    def log_decay(self, a):
        return -torch.exp(self.A_log) * softplus(double(a) + self.dt_bias)

    def vector(self, x):
        return normalised(double(x)) if self.l2norm else double(x)

    def row(self, state, g, d, k, numbers):
        keys = per_head(numbers.of(k), state.shape[0])
        return advance(state, torch.exp(g), torch.ones_like(g), numbers.of(d), keys)

    def token(self, state, g, beta, v, k, q, numbers):
        """Returns the new state, d and the output."""
        heads = state.shape[0]
        keys, queries = per_head(numbers.of(k), heads), per_head(numbers.of(q), heads)
        state = torch.exp(g)[:, None, None] * state
        known = torch.einsum("hvk,hk->hv", state, keys)
        d = beta[:, None] * numbers.minus(numbers.of(v), known)
        state = state + d[:, :, None] * keys[:, None, :]
        return state, d, self.scale * torch.einsum("hvk,hk->hv", state, queries)


def split_qkv(mixed, heads, dim, key_heads, state_dim):
    """[tokens, width] -> q, k [tokens, H, K], v [tokens, HV, V]"""
    keys = key_heads * state_dim
    q, k, v = mixed.split([keys, keys, heads * dim], dim=-1)
    return (
        q.unflatten(-1, (key_heads, state_dim)),
        k.unflatten(-1, (key_heads, state_dim)),
        v.unflatten(-1, (heads, dim)),
    )
