"""The recurrence as this project has it: raw inputs in the ring, read copies, trees, Kimi Delta.

A `Recurrence` is a layer's geometry; it makes `Cursors`, shared by all layers of a model, and one
`State` a layer. One step of a model: cursors.begin, recurrence.step of every layer, cursors.commit.
Arguments may be any objects with __dlpack__; what is written in place must share its memory.
"""

from ctypes import byref, c_int64
from dataclasses import dataclass

import torch

from . import _checks as check
from . import _library as lib
from . import _recurrence_ops as ops

FAMILIES = {
    "mamba2": lib.MAMBA2,
    "gated_delta": lib.GATED_DELTA,
    "kimi_delta": lib.KIMI_DELTA,
}
ROUTES = {
    "conventional": lib.CONVENTIONAL,
    "state_and_output": lib.STATE_AND_OUTPUT,
    "output_only": lib.OUTPUT_ONLY,
}
READ_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)


def as_tensor(x):
    """x as a PyTorch tensor over the same memory."""
    if x is None or isinstance(x, torch.Tensor):
        return x
    return torch.from_dlpack(x)


def _check_indices(device, shape, **tensors):
    """int32 tensors of one shape, as the library reads them."""
    for name, x in tensors.items():
        if x is not None:
            check.dtype(name, x, torch.int32)
            check.shape(name, x, shape)
            check.contiguous(name, x)
    check.same_device(device, **tensors)


@dataclass(frozen=True)
class State:
    """What a layer keeps for every slot."""

    checkpoint: torch.Tensor  # [slots, heads, head_dim, state_dim]
    ring_v: torch.Tensor  # [slots, rows, heads, head_dim]
    ring_k: torch.Tensor  # [slots, rows, key_heads, state_dim], not normalised
    ring_b: torch.Tensor  # [slots, rows, heads] float32
    ring_g: torch.Tensor | None  # [slots, rows, heads] float32; not Kimi Delta
    ring_gate: torch.Tensor | None  # [slots, rows, heads, state_dim], Kimi Delta's raw gates
    read: torch.Tensor | None  # like the checkpoint, in the read dtype
    read_scale: torch.Tensor | None  # [slots, heads, head_dim] float32, 8-bit read copies

    def tensors(self):
        return (
            self.checkpoint, self.ring_v, self.ring_k, self.ring_b, self.ring_g, self.ring_gate,
            self.read, self.read_scale,
        )  # fmt: skip

    def load(self, states):
        """Sets every slot's state from [slots, heads, head_dim, state_dim]; the rings must be
        empty."""
        self.checkpoint.copy_(states)
        if self.read is None:
            return
        if self.read_scale is None:
            self.read.copy_(states)
            return
        exact, most = states.float(), 448.0 if self.read.dtype != torch.int8 else 127.0
        self.read_scale.copy_(exact.abs().amax(-1) / most)
        scale = self.read_scale.unsqueeze(-1)
        rows = torch.where(scale > 0, exact / scale, torch.zeros_like(exact))
        self.read.copy_(rows.round() if self.read.dtype == torch.int8 else rows)


@dataclass(frozen=True)
class Recurrence:
    """The geometry of a recurrent layer and of its rings."""

    family: str  # "mamba2", "gated_delta" or "kimi_delta"
    heads: int
    key_heads: int
    head_dim: int
    state_dim: int
    buffer_len: int = 16
    max_window: int = 1
    conv_kernel: int = 4
    checkpoint_dtype: torch.dtype = torch.float32
    activation_dtype: torch.dtype = torch.bfloat16
    read_dtype: torch.dtype | None = None

    def __post_init__(self):
        if self.family not in FAMILIES:
            check.fail("family", " or ".join(FAMILIES), self.family)
        for name in ("heads", "key_heads", "head_dim", "state_dim"):
            if getattr(self, name) < 1:
                check.fail(name, "1 or more", getattr(self, name))
        for name, most in (("buffer_len", 4096), ("max_window", 4096), ("conv_kernel", 8)):
            if not 1 <= getattr(self, name) <= most:
                check.fail(name, f"1 .. {most}", getattr(self, name))
        check.divides("key_heads", self.key_heads, "heads", self.heads)
        for name in ("checkpoint_dtype", "activation_dtype"):
            if getattr(self, name) not in check.FLOATS:
                check.fail(name, " or ".join(map(str, check.FLOATS)), getattr(self, name))
        if self.read_dtype is not None and self.read_dtype not in READ_DTYPES:
            check.fail("read_dtype", " or ".join(map(str, READ_DTYPES)), self.read_dtype)

    def _config(self, route="output_only"):
        if route not in ROUTES:
            check.fail("route", " or ".join(ROUTES), route)
        ring = (self.buffer_len, self.max_window, self.conv_kernel)
        return [FAMILIES[self.family], ROUTES[route], *ring]

    @property
    def ring_rows(self):
        ring = lib.RingConfig(self.buffer_len, self.max_window, self.conv_kernel)
        return lib.function("ring_rows")(byref(ring))

    def state(self, slots, device="cuda"):
        """Zeroed memory for so many slots."""

        def make(*shape, dtype):
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        rows, kimi = self.ring_rows, self.family == "kimi_delta"
        per_state = (self.heads, self.head_dim, self.state_dim)
        reads = self.read_dtype is not None
        eight_bit = reads and self.read_dtype.itemsize == 1
        act, f32 = self.activation_dtype, torch.float32
        return State(
            checkpoint=make(*per_state, dtype=self.checkpoint_dtype),
            ring_v=make(rows, self.heads, self.head_dim, dtype=act),
            ring_k=make(rows, self.key_heads, self.state_dim, dtype=act),
            ring_b=make(rows, self.heads, dtype=f32),
            ring_g=None if kimi else make(rows, self.heads, dtype=f32),
            ring_gate=make(rows, self.heads, self.state_dim, dtype=act) if kimi else None,
            read=make(*per_state, dtype=self.read_dtype) if reads else None,
            read_scale=make(self.heads, self.head_dim, dtype=f32) if eight_bit else None,
        )

    def cursors(self, slots, device="cuda"):
        """Cursors of so many empty slots."""
        return Cursors(self, slots, device)

    def _check_state(self, state, gate_scale, gate_bias):
        """What another layer's state would get wrong, and Kimi Delta's constants."""
        slots = state.checkpoint.shape[0]
        rows = (slots, self.ring_rows)
        check.shape(
            "state.checkpoint", state.checkpoint, (slots, self.heads, self.head_dim, self.state_dim)
        )
        check.shape("state.ring_v", state.ring_v, (*rows, self.heads, self.head_dim))
        check.shape("state.ring_k", state.ring_k, (*rows, self.key_heads, self.state_dim))
        for name, x, expected in (
            ("gate_scale", gate_scale, (self.heads,)),
            ("gate_bias", gate_bias, (self.heads, self.state_dim)),
        ):
            if x is not None:
                check.shape(name, x, expected)
                check.dtype(name, x, torch.float32)
                check.contiguous(name, x)

    def _check_tokens(self, tokens, v, k, q, b, g, gate, skip, z, o):
        v_shape = (tokens, self.heads, self.head_dim)
        k_shape = (tokens, self.key_heads, self.state_dim)
        act, kimi = self.activation_dtype, self.family == "kimi_delta"
        for name, x, expected, dtype in (
            ("v", v, v_shape, act),
            ("k", k, k_shape, act),
            ("q", q, k_shape, act),
            ("b", b, (tokens, self.heads), torch.float32),
            ("g", g, (tokens, self.heads), torch.float32),
            ("gate", gate, (tokens, self.heads, self.state_dim), act),
            ("skip", skip, (self.heads,), torch.float32),
            ("z", z, v_shape, act),
            ("o", o, v_shape, None),
        ):
            if x is None:
                continue
            check.shape(name, x, expected)
            check.dtype(name, x, *(check.FLOATS if dtype is None else (dtype,)))
            inner = x if x.dim() < 3 or name == "o" else x[0] if tokens else x
            check.contiguous(name, inner)
        for name, x, wanted in (("g", g, not kimi), ("gate", gate, kimi)):
            if (x is None) == wanted:
                given = "None" if x is None else "a tensor"
                check.fail(name, f"{'a tensor' if wanted else 'None'} for {self.family}", given)

    def step(
        self, state, cursors, v, k, q, b, g=None, *, query_start=None, slot, parent=None,
        gate=None, gate_scale=None, gate_bias=None, lower_bound=0.0, skip=None, z=None, o=None,
        o_dtype=None, route="output_only",
    ):  # fmt: skip
        """One decode step of a layer; returns o [tokens, heads, head_dim].

        v [tokens, heads, head_dim], k and q [tokens, key_heads, state_dim] in the activation
        dtype, b and g [tokens, heads] float32: write strengths and log decays. query_start
        [sequences + 1] and slot [sequences] are int32, slot -1 is padding; parent [tokens] int32
        makes the windows trees. Kimi Delta takes gate [tokens, heads, state_dim], gate_scale
        [heads] and gate_bias [heads, state_dim] instead of g.
        """
        v, k, q, b, g, gate, skip, z, o = map(as_tensor, (v, k, q, b, g, gate, skip, z, o))
        slot, parent = as_tensor(slot), as_tensor(parent)
        if query_start is None:
            query_start = cursors.single(slot.shape[0])
        if o is None:
            o = torch.empty_like(v, dtype=o_dtype, memory_format=torch.contiguous_format)
        self._check_state(state, gate_scale, gate_bias)
        self._check_tokens(v.shape[0], v, k, q, b, g, gate, skip, z, o)
        device, sequences = state.checkpoint.device, slot.shape[:1].numel()
        _check_indices(device, (sequences,), slot=slot)
        _check_indices(device, (sequences + 1,), query_start=query_start)
        _check_indices(device, (v.shape[0],), parent=parent)
        check.same_device(
            device, cursors=cursors.data, v=v, k=k, q=q, b=b, g=g, gate=gate,
            gate_scale=gate_scale, gate_bias=gate_bias, skip=skip, z=z, o=o,
        )  # fmt: skip
        ops.step(
            *state.tensors(), cursors.data, query_start, slot, parent, self._config(route), v, k,
            q, b, g, gate, gate_scale, gate_bias, lower_bound, skip, z, o,
        )  # fmt: skip
        return o

    def fold(
        self, state, cursors, *, slot, target_slot=None, gate_scale=None, gate_bias=None,
        lower_bound=0.0,
    ):  # fmt: skip
        """Folds the rings of `slot` into their checkpoints, or into those of `target_slot`.

        cursors.fold must follow the last layer's.
        """
        self._check_state(state, gate_scale, gate_bias)
        device = state.checkpoint.device
        _check_indices(device, (slot.shape[:1].numel(),), slot=slot, target_slot=target_slot)
        check.same_device(device, cursors=cursors.data, gate_scale=gate_scale, gate_bias=gate_bias)
        ops.fold(
            *state.tensors(), cursors.data, slot, target_slot, self._config(), gate_scale,
            gate_bias, lower_bound,
        )  # fmt: skip


class Cursors:
    """Where the slots of a model stand: [slots, 3] int64 on the device, moved by ops alone."""

    def __init__(self, recurrence, slots, device="cuda"):
        self.recurrence = recurrence
        self.data = torch.zeros(slots, 3, dtype=torch.int64, device=device)
        self._single = {}
        self.reset(torch.arange(slots, dtype=torch.int32))

    def single(self, sequences):
        """query_start of one token a sequence."""
        if sequences not in self._single:
            self._single[sequences] = torch.arange(
                sequences + 1, dtype=torch.int32, device=self.data.device
            )
        return self._single[sequences]

    def _on_host(self, function, slot, *arguments):
        host, slot = self.data.cpu(), slot.cpu()
        _check_indices(slot.device, (slot.shape[:1].numel(),), slot=slot)
        check.slots("slot", slot, cursors=host)
        lib.function(function)(
            c_int64(slot.shape[0]), ops.address(slot), *arguments, ops.address(host)
        )
        self.data.copy_(host)

    def _ring(self):
        return byref(ops.ring(self.recurrence._config()))

    def reset(self, slot):
        """Empties slots; synchronises."""
        self._on_host("reset_slots", slot, self._ring())

    def prefilled(self, slot, tokens):
        """After a prefill of tokens[i] tokens whose states were loaded; synchronises."""
        check.shape("tokens", tokens, slot.shape)
        if tokens.numel() > 0 and int(tokens.min()) < 0:
            check.fail("tokens", "0 or more", int(tokens.min()))
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), tokens.cpu().int().cumsum(0).int()])
        self._on_host("commit_prefills", slot, ops.address(starts), self._ring())

    def folded(self, slot):
        """After recurrence.fold of every layer, in place; synchronises."""
        self._on_host("commit_folds", slot, ops.address(None))

    def begin(self, slot, query_start=None):
        """Before the layers of a step."""
        if query_start is None:
            query_start = self.single(slot.shape[0])
        sequences = slot.shape[:1].numel()
        _check_indices(self.data.device, (sequences,), slot=slot)
        _check_indices(self.data.device, (sequences + 1,), query_start=query_start)
        ops.begin(self.data, query_start, slot, self.recurrence._config())

    def commit(self, slot, accepted, route="output_only"):
        """After the layers: accepted [sequences] int32 tokens of each window stay."""
        shape = (slot.shape[:1].numel(),)
        _check_indices(self.data.device, shape, slot=slot, accepted=accepted)
        ops.commit(self.data, accepted, slot, self.recurrence._config(route))
