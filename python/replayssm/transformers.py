"""Hugging Face transformers with our decode step: `patch(model)`, then `model.generate(...)`.

Patched are the recurrent layers of Mamba-2 models (Mamba-2, Nemotron-H, Bamba, Falcon-H1, Granite,
Zamba2), of Gated Delta models (Qwen3.5, Qwen3-Next) and of Kimi-Linear. A decode step of one token
keeps its inputs in a ring and writes the state once per `buffer_len` tokens. Whoever else reads or
writes the cache's recurrent states (a longer prompt, beam search, a copy) finds them up to date.
"""

import inspect
import sys
import threading
import types
from contextlib import contextmanager

import torch

from .recurrent import Cursors, Recurrence

_current = threading.local()


class _States(dict):
    """A cache layer's recurrent states: handed out only after the rings were folded into them."""

    def __init__(self, states, pool):
        super().__init__(states)
        self.pool = pool

    def _released(self):
        if not self.pool.decoding:
            self.pool.release()
        return super()

    def __getitem__(self, index):
        return self._released().__getitem__(index)

    def get(self, index, default=None):
        return self._released().get(index, default)

    def items(self):
        return self._released().items()

    def values(self):
        return self._released().values()


class _Layer:
    """Our memory of one layer, and how the cache's own state lies in memory."""

    def __init__(self, recurrence, state, transposed):
        self.recurrence, self.state, self.transposed = recurrence, state, transposed
        self.live, self.gate = False, {}

    def of_cache(self, states):
        """The cache's state as [slots, heads, head_dim, state_dim]."""
        return states.transpose(-1, -2) if self.transposed else states


class _Pool:
    """What we keep for one cache: a layer each, cursors for all."""

    def __init__(self, cache, buffer_len):
        self.cache, self.buffer_len = cache, buffer_len
        self.layers, self.cursors = {}, None
        self.decoding = self.pending = False
        self.last_layer = -1
        self.module = self.raw_gate = None

    def states(self, index):
        """The cache's own dictionary of layer `index`, without folding."""
        layer = self.cache.layers[index]
        if not isinstance(layer.recurrent_states, _States):
            layer.recurrent_states = _States(layer.recurrent_states, self)
        return layer.recurrent_states

    @contextmanager
    def decode(self, module):
        self.states(module.layer_idx)
        self.decoding, self.module, self.raw_gate = True, module, None
        before, _current.pool = getattr(_current, "pool", None), self
        try:
            yield
        finally:
            self.decoding, self.module, self.raw_gate = False, None, None
            _current.pool = before

    def _enter(self, family, key_heads, states, activation, transposed):
        """The current layer, ready for one token of every sequence."""
        index = self.module.layer_idx
        layer = self.layers.get(index)
        batch, heads, head_dim, state_dim = (
            states.transpose(-1, -2) if transposed else states
        ).shape
        if layer is None or layer.state.checkpoint.shape[0] != batch:
            recurrence = Recurrence(
                family, heads, key_heads, head_dim, state_dim, buffer_len=self.buffer_len,
                checkpoint_dtype=states.dtype, activation_dtype=activation,
            )  # fmt: skip
            layer = _Layer(recurrence, recurrence.state(batch, states.device), transposed)
            self.layers[index] = layer
        self._begin_step(layer.recurrence, index, batch, states.device)
        if not layer.live:
            layer.state.load(layer.of_cache(states))
            layer.live = True
        return layer

    def _begin_step(self, recurrence, index, batch, device):
        if self.pending and index > self.last_layer:
            self.last_layer = index
            return
        if self.cursors is None or self.cursors.data.shape[0] != batch:
            self.cursors = Cursors(recurrence, batch, device)
            self.slot = torch.arange(batch, dtype=torch.int32, device=device)
            self.accepted = torch.ones(batch, dtype=torch.int32, device=device)
        elif self.pending:
            self.cursors.commit(self.slot, self.accepted)
        self.cursors.begin(self.slot)
        self.pending, self.last_layer = True, index

    def step(self, family, v, k, q, b, states, *, transposed, g=None, gate=None, skip=None):
        """v, k, q: [batch, heads, n]; returns the output, [batch, heads, head_dim]."""
        layer = self._enter(family, k.shape[1], states, v.dtype, transposed)
        layer.gate = gate or {}
        raw = {"gate": self.raw_gate.view(*k.shape)} if gate else {}
        v, k, q = (x.contiguous() for x in (v, k, q))
        return layer.recurrence.step(
            layer.state, self.cursors, v, k, q, b.float().contiguous(), g, slot=self.slot,
            skip=skip, **raw, **layer.gate,
        )  # fmt: skip

    def release(self):
        """Brings the cache's own states up to date and forgets ours."""
        live = [index for index, layer in self.layers.items() if layer.live]
        if not live:
            return
        if self.pending:
            self.cursors.commit(self.slot, self.accepted)
        for index in live:
            layer = self.layers[index]
            layer.recurrence.fold(layer.state, self.cursors, slot=self.slot, **layer.gate)
            cached = dict.__getitem__(self.states(index), 0)
            layer.of_cache(cached).copy_(layer.state.checkpoint)
            layer.live = False
        self.cursors.reset(self.slot)
        self.pending, self.last_layer = False, -1


def _pool(cache, buffer_len):
    pool = getattr(cache, "_replayssm", None)
    if pool is None or pool.cache is not cache:
        pool = cache._replayssm = _Pool(cache, buffer_len)
    return pool


def _mamba2(original):
    def selective_state_update(
        state, hidden_states, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, **kwargs
    ):
        pool = getattr(_current, "pool", None)
        if pool is None or z is not None:
            return original(
                state, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias,
                dt_softplus=dt_softplus, **kwargs,
            )  # fmt: skip
        step = dt[:, :, 0].float()
        if dt_bias is not None:
            step = step + dt_bias[:, 0].float()
        if dt_softplus:
            step = torch.nn.functional.softplus(step)
        return pool.step(
            "mamba2", hidden_states, B, C, step, state, transposed=False,
            g=step * A[:, 0, 0].float(), skip=None if D is None else D[:, 0].float().contiguous(),
        )  # fmt: skip

    return selective_state_update


def _gated_delta(original):
    def recurrent_gated_delta_rule(query, key, value, g, beta, initial_state=None, **kwargs):
        pool = getattr(_current, "pool", None)
        if pool is None or initial_state is None:
            return original(
                query, key, value, g=g, beta=beta, initial_state=initial_state, **kwargs
            )
        # The layer repeats keys for the heads that share them.
        shared = pool.module.num_v_heads // pool.module.num_k_heads
        out = pool.step(
            "gated_delta", value[:, 0], key[:, 0, ::shared], query[:, 0, ::shared], beta[:, 0],
            initial_state, transposed=True, g=g[:, 0].float().contiguous(),
        )  # fmt: skip
        return out.unsqueeze(1), initial_state

    return recurrent_gated_delta_rule


def _kimi_delta(original):
    def recurrent_kimi_delta_attention(query, key, value, g, beta, initial_state, *args, **kwargs):
        pool = getattr(_current, "pool", None)
        if pool is None or initial_state is None or pool.raw_gate is None:
            return original(query, key, value, g, beta, initial_state, *args, **kwargs)
        forget, heads = pool.module.forget_gate, key.shape[2]
        gate = {
            "gate_scale": -forget.A_log.detach().float().exp().view(heads),
            "gate_bias": forget.dt_bias.detach().float().view(heads, -1),
        }
        out = pool.step(
            "kimi_delta", value[:, 0], key[:, 0], query[:, 0], beta[:, 0], initial_state,
            transposed=True, gate=gate,
        )  # fmt: skip
        return out.unsqueeze(1), initial_state

    return recurrent_kimi_delta_attention


_FUNCTIONS = {
    "mamba2_selective_state_update": _mamba2,
    "torch_recurrent_gated_delta_rule": _gated_delta,
    "recurrent_kimi_delta_attention": _kimi_delta,
}


def _patch_functions(modeling):
    """Names that the modeling module calls; returns whether there is one of ours."""
    found = False
    for name, make in _FUNCTIONS.items():
        function = getattr(modeling, name, None)
        if function is None:
            continue
        found = True
        if not hasattr(function, "_replayssm_original"):
            replacement = make(function)
            replacement._replayssm_original = function
            setattr(modeling, name, replacement)
    return found


def _patch_layer(module, buffer_len):
    original = module.forward
    signature = inspect.signature(original)

    def forward(self, *args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        cache, hidden = given.get("cache_params"), next(iter(given.values()))
        if cache is None or hidden.shape[1] != 1 or not cache.has_previous_state(self.layer_idx):
            return original(*args, **kwargs)
        with _pool(cache, buffer_len).decode(self):
            return original(*args, **kwargs)

    module._replayssm_forward = original
    module.forward = types.MethodType(forward, module)
    forget_gate = getattr(module, "forget_gate", None)
    if forget_gate is not None:
        module._replayssm_hook = forget_gate.f_b_proj.register_forward_hook(_keep_raw_gate)


def _keep_raw_gate(module, inputs, output):
    pool = getattr(_current, "pool", None)
    if pool is not None:
        pool.raw_gate = output


def _layers(model):
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "conv1d"):
            yield module


def patch(model, buffer_len=16):
    """Makes `model` decode with our step; returns the model."""
    if buffer_len < 1:
        raise ValueError(f"buffer_len: expected 1 or more, got {buffer_len}")
    count = 0
    for module in _layers(model):
        modeling = sys.modules[type(module).__module__]
        if hasattr(module, "_replayssm_forward") or not _patch_functions(modeling):
            continue
        _patch_layer(module, buffer_len)
        count += 1
    if count == 0:
        raise ValueError(
            f"model: expected recurrent layers of Mamba-2, Gated Delta or Kimi Delta that are not "
            f"patched yet, got {type(model).__name__}"
        )
    return model


def unpatch(model):
    """Undoes patch; caches in use must not be used on."""
    for module in _layers(model):
        if hasattr(module, "_replayssm_forward"):
            del module.forward, module._replayssm_forward
        if hasattr(module, "_replayssm_hook"):
            module._replayssm_hook.remove()
            del module._replayssm_hook
    return model
