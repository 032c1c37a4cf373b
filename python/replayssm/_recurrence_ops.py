"""The ops behind the native API: their schemas, and calls of the library.

config: family, route, buffer_len, max_window, conv_kernel.
"""

from ctypes import byref, c_int64, c_uint8

import torch

from . import _checks as check
from . import _library as lib
from ._tensors import call, define, dtype_code, pointer


def ring(config):
    return lib.RingConfig(*config[2:5])


def _batch(config, cursors, query_start, slot, parent=None):
    return lib.Batch(
        sequences=slot.shape[0],
        query_start=pointer(query_start),
        slot=pointer(slot),
        cursors=pointer(cursors),
        ring=ring(config),
        parent=pointer(parent),
    )


def _shape(config, state, ring_k):
    slots, heads, head_dim, state_dim = state.shape
    return lib.Shape(config[0], heads, ring_k.shape[2], head_dim, state_dim)


def _state(checkpoint, ring_v, ring_k, ring_b, ring_g, ring_gate, read, read_scale):
    return lib.State(
        checkpoint=pointer(checkpoint),
        ring_v=pointer(ring_v),
        ring_k=pointer(ring_k),
        ring_b=pointer(ring_b),
        ring_g=pointer(ring_g),
        ring_gate=pointer(ring_gate),
        checkpoint_dtype=dtype_code(checkpoint.dtype),
        activation_dtype=dtype_code(ring_v.dtype),
        read_copy=lib.ReadCopy(
            pointer(read), pointer(read_scale), 0 if read is None else dtype_code(read.dtype)
        ),
    )


def _check_rings(config, cursors, slot):
    """Rings on the host have room for a window; a device's cursors are not read."""
    if cursors.device.type != "cpu":
        return
    rows = lib.function("ring_rows")(byref(ring(config)))
    fields = cursors.view(torch.int32)[slot[slot >= 0].long()]  # 2: ring_count, 4: fold_count
    held = fields[:, 2].long() + fields[:, 4]
    if held.numel() > 0 and not 0 <= int(held.min()) <= int(held.max()) <= rows - config[3]:
        expected = f"rings of 0 .. {rows - config[3]} rows, begin before every step"
        check.fail("cursors", expected, f"{int(held.min())} .. {int(held.max())}")


def _begin(cursors, query_start, slot, config):
    check.slots("slot", slot, cursors=cursors)
    check.windows("query_start", query_start, 2**31 - 1, config[3])
    if cursors.device.type == "cuda":
        batch = _batch(config, cursors, query_start, slot)
        _on_device("begin_steps", cursors, byref(batch), address(cursors))
        return
    lib.function("begin_steps")(
        c_int64(slot.shape[0]), address(slot), address(query_start), byref(ring(config)),
        address(cursors),
    )  # fmt: skip


def _commit(cursors, accepted, slot, config):
    check.slots("slot", slot, cursors=cursors)
    if cursors.device.type == "cpu":
        for i, tokens in enumerate(accepted.tolist()):
            if slot[i] >= 0 and not 0 <= tokens <= config[3]:
                check.fail(f"accepted[{i}]", f"0 to {config[3]} tokens", tokens)
    route = c_uint8(config[1])
    if cursors.device.type == "cuda":
        batch = _batch(config, cursors, None, slot)
        _on_device(
            "commit_steps", cursors, byref(batch), address(accepted), route, address(cursors)
        )
        return
    lib.function("commit_steps")(
        c_int64(slot.shape[0]), address(slot), address(accepted), route, address(cursors)
    )


def _on_device(name, x, *arguments):
    with torch.cuda.device(x.device):
        lib.call_cuda(name, torch.cuda.current_stream().cuda_stream, *arguments)


def stride(x):
    """From token to token; a single token's stride may be any number and is not used."""
    if x is None:
        return 0
    return x.stride(0) if x.shape[0] > 1 else x.shape[1:].numel()


def address(x):
    return lib.c_void_p(None if x is None else x.data_ptr())


def _run_step(
    checkpoint, ring_v, ring_k, ring_b, ring_g, ring_gate, read, read_scale, cursors, query_start,
    slot, parent, config, v, k, q, b, g, gate, gate_scale, gate_bias, lower_bound, skip, z, o,
):  # fmt: skip
    check.slots("slot", slot, state=checkpoint, cursors=cursors)
    check.windows("query_start", query_start, v.shape[0], config[3])
    _check_rings(config, cursors, slot)
    params = lib.StepParams(
        shape=_shape(config, checkpoint, ring_k),
        route=config[1],
        batch=_batch(config, cursors, query_start, slot, parent),
        state=_state(checkpoint, ring_v, ring_k, ring_b, ring_g, ring_gate, read, read_scale),
        v=pointer(v),
        k=pointer(k),
        q=pointer(q),
        v_stride=stride(v),
        k_stride=stride(k),
        q_stride=stride(q),
        b=pointer(b),
        g=pointer(g),
        gate=pointer(gate),
        gate_stride=stride(gate),
        channel_gate=lib.ChannelGate(pointer(gate_scale), pointer(gate_bias), lower_bound),
        skip=pointer(skip),
        z=pointer(z),
        z_stride=stride(z),
        o=pointer(o),
        o_dtype=dtype_code(o.dtype),
    )
    call("recurrent_step", checkpoint.device, params)


def _run_fold(
    checkpoint, ring_v, ring_k, ring_b, ring_g, ring_gate, read, read_scale, cursors, slot,
    target_slot, config, gate_scale, gate_bias, lower_bound,
):  # fmt: skip
    check.slots("slot", slot, state=checkpoint, cursors=cursors)
    _check_rings(config, cursors, slot)
    if target_slot is not None:
        check.slots("target_slot", target_slot, state=checkpoint)
    params = lib.FoldParams(
        shape=_shape(config, checkpoint, ring_k),
        batch=_batch(config, cursors, None, slot),
        state=_state(checkpoint, ring_v, ring_k, ring_b, ring_g, ring_gate, read, read_scale),
        channel_gate=lib.ChannelGate(pointer(gate_scale), pointer(gate_bias), lower_bound),
        target_slot=pointer(target_slot),
    )
    call("recurrent_fold", checkpoint.device, params)


_STATE = (
    "Tensor(a!) checkpoint, Tensor(b!) ring_v, Tensor(c!) ring_k, Tensor(d!) ring_b, "
    "Tensor(e!)? ring_g, Tensor(f!)? ring_gate, Tensor(g!)? read, Tensor(h!)? read_scale, "
    "Tensor cursors"
)
begin = define(
    "recurrent_begin(Tensor(a!) cursors, Tensor query_start, Tensor slot, int[] config) -> ()",
    _begin,
)
commit = define(
    "recurrent_commit(Tensor(a!) cursors, Tensor accepted, Tensor slot, int[] config) -> ()",
    _commit,
)
step = define(
    f"recurrent_step({_STATE}, Tensor query_start, Tensor slot, Tensor? parent, int[] config, "
    "Tensor v, Tensor k, Tensor q, Tensor b, Tensor? g, Tensor? gate, Tensor? gate_scale, "
    "Tensor? gate_bias, float lower_bound, Tensor? skip, Tensor? z, Tensor(i!) o) -> ()",
    _run_step,
)
fold = define(
    f"recurrent_fold({_STATE}, Tensor slot, Tensor? target_slot, int[] config, "
    "Tensor? gate_scale, Tensor? gate_bias, float lower_bound) -> ()",
    _run_fold,
)
