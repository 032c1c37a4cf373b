"""Mamba-2 decode over an engine's paged caches: the published ReplaySSM functions.

Names, arguments, cache layouts and cursor rules are those of the functions that engines call;
docs/python.md states the contract.
"""

import torch

from . import _checks as check
from . import _library as lib
from ._tensors import call, define, integers, values

NULL_BLOCK_ID = 0


def per_head(x):
    """Constants of heads, with all their strides."""
    return values(None) if x is None else values(x, *x.stride())


def _single_step(
    state, x, dt, a, b, c, d, dt_bias, z, dt_softplus, x_cache, dt_cache, b_cache, write_pos,
    is_flush, state_batch_indices, null_block_id, out,
):  # fmt: skip
    batch, heads, dim = x.shape
    if state_batch_indices is not None:
        check.slots(
            "state_batch_indices", state_batch_indices[:batch], null_block_id, state=state,
            x_cache=x_cache, dt_cache=dt_cache, B_cache=b_cache,
        )  # fmt: skip
    step = lib.PAGED_STEP.pack(
        lib.MAMBA2, lib.PAGED_SINGLE, 0, dt_softplus, 0,
        batch, heads, b.shape[1], dim, state.shape[3], x_cache.shape[2], 1, null_block_id, 1.0,
        *integers(state_batch_indices), *integers(None), *integers(write_pos), *integers(None),
        *integers(is_flush),
        *values(state), *values(x), *values(b), *values(c), *values(dt, *dt.stride()),
        *values(None), *values(a, *a.stride()), *per_head(dt_bias), *per_head(d), *values(z),
        *values(out), *values(x_cache), *values(b_cache), *values(dt_cache, *dt_cache.stride()),
    )  # fmt: skip
    call("paged_step_run", state.device, step)


_single = define(
    "mamba2_step(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? dt_bias, Tensor? z, bool dt_softplus, Tensor(b!) x_cache, Tensor(c!) dt_cache, "
    "Tensor(d!) B_cache, Tensor write_pos, Tensor is_flush, Tensor? state_batch_indices, "
    "int null_block_id, Tensor(e!) out) -> ()",
    _single_step,
)


def _with_heads(x, rank, dim):
    """x of a layer without heads gets one."""
    return x.unsqueeze(dim) if x is not None and x.dim() == rank else x


@check.remembered
def _check_single(
    state, x, dt, A, B, C, D, dt_bias, z, x_cache, dt_cache, B_cache, write_pos, is_flush,
    max_cache_len, state_batch_indices, out,
):  # fmt: skip
    for name, tensor, ranks in (
        ("state", state, (4,)),
        ("x", x, (3,)),
        ("B", B, (3,)),
        ("x_cache", check.present("x_cache", x_cache), (4,)),
        ("dt_cache", check.present("dt_cache", dt_cache), (3,)),
        ("B_cache", check.present("B_cache", B_cache), (4,)),
    ):
        check.rank(name, tensor, *ranks)
    _, heads, dim, state_dim = state.shape
    batch, groups = x.shape[0], B.shape[1]
    check.shape("x", x, (batch, heads, dim))
    check.shape("dt", dt, (batch, heads, dim))
    check.shape("A", A, (heads, dim, state_dim))
    check.divides("B.shape[1]", groups, "nheads", heads)
    check.shape("B", B, (batch, groups, state_dim))
    check.shape("C", C, (batch, groups, state_dim))
    for name, tensor, expected in (
        ("D", D, (heads, dim)),
        ("z", z, (batch, heads, dim)),
        ("dt_bias", dt_bias, (heads, dim)),
        ("out", out, (batch, heads, dim)),
    ):
        if tensor is not None:
            check.shape(name, tensor, expected)
    check.tied("A", A, 2)
    check.tied("dt", dt, 1)
    if dt_bias is not None:
        check.tied("dt_bias", dt_bias, 1)
    check.shape("x_cache", x_cache, (x_cache.shape[0], heads, max_cache_len, dim))
    check.shape("dt_cache", dt_cache, (dt_cache.shape[0], heads, max_cache_len))
    check.shape("B_cache", B_cache, (B_cache.shape[0], groups, max_cache_len, state_dim))
    check.at_least("write_pos", check.present("write_pos", write_pos), batch)
    check.at_least("is_flush", check.present("is_flush", is_flush), batch)
    check.dtype("write_pos", write_pos, torch.int32)
    check.dtype("is_flush", is_flush, torch.bool, torch.int8)
    check.dtype("dt_cache", dt_cache, torch.float32)
    if state_batch_indices is None:
        for name, tensor in (
            ("state", state), ("x_cache", x_cache), ("dt_cache", dt_cache), ("B_cache", B_cache),
        ):  # fmt: skip
            if tensor.shape[0] < batch:
                check.fail(name, f"a slot for each of {batch} rows", f"{tensor.shape[0]} slots")
    else:
        check.at_least("state_batch_indices", state_batch_indices, batch)
        check.dtype("state_batch_indices", state_batch_indices, *check.INDICES)
    check.floats(
        state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=dt_bias, z=z, out=out,
        x_cache=x_cache, B_cache=B_cache,
    )  # fmt: skip
    check.unit_stride(state=state, x=x, B=B, C=C, z=z, out=out, x_cache=x_cache, B_cache=B_cache)
    check.same_device(
        state.device, x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=dt_bias, z=z, out=out,
        x_cache=x_cache, dt_cache=dt_cache, B_cache=B_cache, write_pos=write_pos,
        is_flush=is_flush, state_batch_indices=state_batch_indices,
    )  # fmt: skip


def _single_update(
    state, x, dt, A, B, C, D, dt_bias, z, dt_softplus, x_cache, dt_cache, B_cache, write_pos,
    is_flush, max_cache_len, state_batch_indices, null_block_id, out,
):  # fmt: skip
    has_heads = state.dim() > 3
    if out is None:
        out = torch.empty_like(x)
    state = _with_heads(state, 3, 1)
    x, dt, z = (_with_heads(t, 2, 1) for t in (x, dt, z))
    result = _with_heads(out, 2, 1)
    B, C = (_with_heads(t, 2, 1) for t in (B, C))
    A, D, dt_bias = _with_heads(A, 2, 0), _with_heads(D, 1, 0), _with_heads(dt_bias, 1, 0)
    if state_batch_indices is not None and state_batch_indices.dim() == 2:
        state_batch_indices = state_batch_indices[:, 0]
    _check_single(
        state, x, dt, A, B, C, D, dt_bias, z, x_cache, dt_cache, B_cache, write_pos, is_flush,
        max_cache_len, state_batch_indices, result,
    )  # fmt: skip
    _single(
        state, x, dt[:, :, 0], A[:, 0, 0], B, C, D, dt_bias[:, 0] if dt_bias is not None else None,
        z, dt_softplus, x_cache, dt_cache, B_cache, write_pos, is_flush, state_batch_indices,
        null_block_id, result,
    )  # fmt: skip
    return result if has_heads else out


def selective_state_update_replayssm_output_only(
    state, x, dt, A, B, C, D=None, dt_bias=None, z=None, dt_softplus=False, x_cache=None,
    dt_cache=None, B_cache=None, bc_pre=None, write_pos=None, is_flush=None, max_cache_len=16,
    state_batch_indices=None, null_block_id=NULL_BLOCK_ID, out=None,
):  # fmt: skip
    """One token per row over the cached x, B and time steps; returns `out`.

    bc_pre, the originals' scratch memory, is neither needed nor touched.
    """
    return _single_update(
        state, x, dt, A, B, C, D, dt_bias, z, dt_softplus, x_cache, dt_cache, B_cache, write_pos,
        is_flush, max_cache_len, state_batch_indices, null_block_id, out,
    )  # fmt: skip


def selective_state_update_replayssm_state_and_output(
    state, x, dt, A, B, C, D=None, dt_bias=None, z=None, dt_softplus=False, x_cache=None,
    dt_cache=None, B_cache=None, write_pos=None, is_flush=None, max_cache_len=16,
    state_batch_indices=None, null_block_id=NULL_BLOCK_ID, out=None,
):  # fmt: skip
    """The same; the state of a row that does not flush is nowhere needed, so it is not formed."""
    return _single_update(
        state, x, dt, A, B, C, D, dt_bias, z, dt_softplus, x_cache, dt_cache, B_cache, write_pos,
        is_flush, max_cache_len, state_batch_indices, null_block_id, out,
    )  # fmt: skip


def _window_step(
    state, post_conv_cache, dt_cache, conv_out, dt, a, write_pos, origin, is_flush,
    query_start_loc, state_batch_indices, max_spec_len, groups, d, z, dt_bias, dt_softplus, out,
    null_block_id,
):  # fmt: skip
    _, heads, dim, state_dim = state.shape
    check.windows("query_start_loc", query_start_loc, conv_out.shape[0], max_spec_len)
    check.slots(
        "state_batch_indices", state_batch_indices, null_block_id, state_checkpoint=state,
        write_pos=write_pos, post_conv_state_pos=origin, is_flush=is_flush,
    )  # fmt: skip
    inner, keys = heads * dim, groups * state_dim
    token, slot, row = conv_out.stride(0), post_conv_cache.stride(0), post_conv_cache.stride(1)
    step = lib.PAGED_STEP.pack(
        lib.MAMBA2, lib.PAGED_WINDOW, 0, dt_softplus, 0,
        state_batch_indices.shape[0], heads, groups, dim, state_dim, post_conv_cache.shape[1],
        max_spec_len, null_block_id, 1.0,
        *integers(state_batch_indices), *integers(query_start_loc), *integers(write_pos),
        *integers(origin), *integers(is_flush),
        *values(state), *values(conv_out, token, dim),
        *values(conv_out, token, state_dim, first=inner),
        *values(conv_out, token, state_dim, first=inner + keys), *values(dt, *dt.stride()),
        *values(None), *values(a, *a.stride()), *per_head(dt_bias), *per_head(d), *values(z),
        *values(out), *values(post_conv_cache, slot, dim, row),
        *values(post_conv_cache, slot, state_dim, row, first=inner),
        *values(dt_cache, *dt_cache.stride()),
    )  # fmt: skip
    call("paged_step_run", state.device, step)


_window = define(
    "mamba2_window_step(Tensor(a!) state, Tensor(b!) post_conv_cache, Tensor(c!) dt_cache, "
    "Tensor conv_out, Tensor dt, Tensor A, Tensor write_pos, Tensor origin, Tensor is_flush, "
    "Tensor query_start_loc, Tensor state_batch_indices, int max_spec_len, int ngroups, "
    "Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, Tensor(d!) out, "
    "int null_block_id) -> ()",
    _window_step,
)


@check.remembered
def _check_window(
    state, post_conv_cache, dt_cache, conv_out, dt_spec, A, write_pos, origin, is_flush,
    query_start_loc, state_batch_indices, max_cache_len, max_spec_len, d_inner, ngroups, dstate,
    D, z, dt_bias, out,
):  # fmt: skip
    check.rank("state_checkpoint", state, 4)
    check.rank("conv_out", conv_out, 2)
    check.rank("post_conv_cache", post_conv_cache, 3)
    blocks, heads, dim, state_dim = state.shape
    tokens, ring = conv_out.shape[0], post_conv_cache.shape[1]
    if state_dim != dstate:
        check.fail("dstate", f"state_checkpoint.shape[3] {state_dim}", dstate)
    if d_inner != heads * dim:
        check.fail("d_inner", f"nheads * dim {heads * dim}", d_inner)
    check.divides("ngroups", ngroups, "nheads", heads)
    check.power_of_two("post_conv_cache.shape[1]", ring)
    check.window("max_spec_len", max_spec_len, max_cache_len, ring)
    inner = heads * dim + ngroups * dstate
    check.shape("conv_out", conv_out, (tokens, inner + ngroups * dstate))
    check.shape("post_conv_cache", post_conv_cache, (blocks, ring, inner))
    check.shape("dt_cache", dt_cache, (blocks, heads, ring))
    check.shape("dt_spec", dt_spec, (tokens, heads))
    check.shape("A", A, (heads, dim, dstate))
    check.tied("A", A, 2)
    check.rank("state_batch_indices", state_batch_indices, 1)
    check.shape("query_start_loc", query_start_loc, (state_batch_indices.shape[0] + 1,))
    check.shape("out", out, (tokens, heads, dim))
    if z is not None:
        check.shape("z", z, (tokens, heads, dim))
    for name, tensor in (("D", D), ("dt_bias", dt_bias)):
        if tensor is not None:
            check.rank(name, tensor, 1, 2)
            check.shape(name, tensor, (heads, dim)[: tensor.dim()])
    if dt_bias is not None and dt_bias.dim() == 2:
        check.tied("dt_bias", dt_bias, 1)
    check.dtype("write_pos", write_pos, torch.int32)
    check.dtype("post_conv_state_pos", origin, torch.int32)
    check.dtype("is_flush", is_flush, torch.int8, torch.bool)
    check.dtype("query_start_loc", query_start_loc, *check.INDICES)
    check.dtype("state_batch_indices", state_batch_indices, *check.INDICES)
    check.dtype("dt_cache", dt_cache, torch.float32)
    check.floats(
        state_checkpoint=state, post_conv_cache=post_conv_cache, conv_out=conv_out,
        dt_spec=dt_spec, A=A, D=D, z=z, dt_bias=dt_bias, out=out,
    )  # fmt: skip
    check.unit_stride(
        state_checkpoint=state, post_conv_cache=post_conv_cache, conv_out=conv_out, z=z, out=out
    )
    check.same_device(
        state.device, post_conv_cache=post_conv_cache, dt_cache=dt_cache, conv_out=conv_out,
        dt_spec=dt_spec, A=A, write_pos=write_pos, post_conv_state_pos=origin, is_flush=is_flush,
        query_start_loc=query_start_loc, state_batch_indices=state_batch_indices, D=D, z=z,
        dt_bias=dt_bias, out=out,
    )  # fmt: skip


def selective_state_update_replayssm_spec(
    state_checkpoint, post_conv_cache, dt_cache, conv_out, dt_spec, A, write_pos,
    post_conv_state_pos, is_flush, query_start_loc, state_batch_indices, max_cache_len,
    max_spec_len, d_inner, ngroups, dstate, D=None, z=None, dt_bias=None, dt_softplus=True,
    out=None, bc_pre=None, null_block_id=NULL_BLOCK_ID,
):  # fmt: skip
    """One verify window per row over the ring of post-convolution x and B; returns `out`.

    Cursors go by block and are moved by commit_replayssm_spec. bc_pre is not touched.
    """
    if out is None:
        heads, dim = state_checkpoint.shape[1:3]
        out = conv_out.new_empty(conv_out.shape[0], heads, dim)
    _check_window(
        state_checkpoint, post_conv_cache, dt_cache, conv_out, dt_spec, A, write_pos,
        post_conv_state_pos, is_flush, query_start_loc, state_batch_indices, max_cache_len,
        max_spec_len, d_inner, ngroups, dstate, D, z, dt_bias, out,
    )  # fmt: skip
    if conv_out.shape[0] == 0:
        return out
    if D is not None and D.dim() == 1:
        D = D.unsqueeze(1).expand(-1, state_checkpoint.shape[2])
    if dt_bias is not None and dt_bias.dim() == 2:
        dt_bias = dt_bias[:, 0]
    _window(
        state_checkpoint, post_conv_cache, dt_cache, conv_out, dt_spec, A[:, 0, 0], write_pos,
        post_conv_state_pos, is_flush, query_start_loc, state_batch_indices, max_spec_len,
        ngroups, D, z, dt_bias, dt_softplus, out, null_block_id,
    )  # fmt: skip
    return out
