"""Gated Delta decode over an engine's paged caches: the published ReplaySSM functions.

The caches hold what the published functions keep there: corrected values d, normalised keys, log
decays. docs/python.md states the contract.
"""

import torch

from . import _checks as check
from . import _library as lib
from ._tensors import call, define, integers, values


def _step(
    rule, part, mixed_qkv, a, b, a_log, dt_bias, scale, state, d_cache, k_cache, g_cache, out,
    indices, query_start, write_pos, origin, is_flush, max_window, normalise, null_block_id,
):  # fmt: skip
    _, heads, dim, state_dim = state.shape
    by_slot = {"state": state, "d_cache": d_cache, "k_cache": k_cache, "g_cache": g_cache}
    if rule == lib.PAGED_WINDOW:
        by_slot |= {"write_pos": write_pos, "cache_base": origin, "is_flush": is_flush}
        check.windows("query_start_loc", query_start, mixed_qkv.shape[0], max_window)
    check.slots("ssm_state_indices", indices, null_block_id, **by_slot)
    key_heads = k_cache.shape[1]
    keys, token = key_heads * state_dim, mixed_qkv.stride(0)
    step = lib.PAGED_STEP.pack(
        lib.GATED_DELTA, rule, part, 0, normalise,
        indices.shape[0], heads, key_heads, dim, state_dim, d_cache.shape[2], max_window,
        null_block_id, scale,
        *integers(indices), *integers(query_start), *integers(write_pos), *integers(origin),
        *integers(is_flush),
        *values(state), *values(mixed_qkv, token, dim, first=2 * keys),
        *values(mixed_qkv, token, state_dim, first=keys), *values(mixed_qkv, token, state_dim),
        *values(a, *a.stride()), *values(b, *b.stride()), *values(a_log, *a_log.stride()),
        *values(dt_bias, *dt_bias.stride()), *values(None), *values(None),
        *values(out, heads * dim, dim), *values(d_cache), *values(k_cache),
        *values(g_cache, *g_cache.stride()),
    )  # fmt: skip
    call("paged_step_run", state.device, step)


def _single_step(
    mixed_qkv, a, b, a_log, dt_bias, scale, state, d_cache, k_cache, g_cache, out, indices,
    write_pos, normalise,
):  # fmt: skip
    _step(
        lib.PAGED_SINGLE, 0, mixed_qkv, a, b, a_log, dt_bias, scale, state, d_cache, k_cache,
        g_cache, out, indices, None, write_pos, None, None, 1, normalise, 0,
    )  # fmt: skip


def _window_step(
    mixed_qkv, a, b, a_log, dt_bias, scale, state, d_cache, k_cache, g_cache, out, indices,
    query_start, write_pos, cache_base, is_flush, max_spec_len, normalise, null_block_id, part,
):  # fmt: skip
    _step(
        lib.PAGED_WINDOW, part, mixed_qkv, a, b, a_log, dt_bias, scale, state, d_cache, k_cache,
        g_cache, out, indices, query_start, write_pos, cache_base, is_flush, max_spec_len,
        normalise, null_block_id,
    )  # fmt: skip


_TENSORS = (
    "Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, float scale, "
    "Tensor(a!) state, Tensor(b!) d_cache, Tensor(c!) k_cache, Tensor(d!) g_cache, "
    "Tensor(e!) out, Tensor state_indices"
)
_single = define(
    f"gated_delta_step({_TENSORS}, Tensor write_pos, bool use_qk_l2norm) -> ()", _single_step
)
_window = define(
    f"gated_delta_window_step({_TENSORS}, Tensor query_start_loc, Tensor write_pos, "
    "Tensor cache_base, Tensor is_flush, int max_spec_len, bool use_qk_l2norm, "
    "int null_block_id, int part) -> ()",
    _window_step,
)

_PARTS = {"both": 0, "verify": 1, "flush": 2}


@check.remembered
def _check(
    state_name, mixed_qkv, a, b, A_log, dt_bias, state, d_cache, k_cache, g_cache, out, indices,
    write_pos,
):  # fmt: skip
    check.rank("mixed_qkv", mixed_qkv, 2)
    check.rank(state_name, state, 4)
    for name, x in (("d_cache", d_cache), ("k_cache", k_cache)):
        check.rank(name, x, 4)
    tokens, width = mixed_qkv.shape
    _, heads, dim, state_dim = state.shape
    if state_dim < 1:
        check.fail(state_name, "at least one column", f"shape {tuple(state.shape)}")
    keys = (width - heads * dim) // 2
    if keys <= 0 or (width - heads * dim) % (2 * state_dim) != 0:
        expected = f"shape (tokens, 2 H {state_dim} + {heads} * {dim})"
        check.fail("mixed_qkv", expected, tuple(mixed_qkv.shape))
    key_heads, ring = keys // state_dim, d_cache.shape[2]
    check.divides("H of mixed_qkv", key_heads, "HV", heads)
    check.shape("a", a, (tokens, heads))
    check.shape("b", b, (tokens, heads))
    check.shape("A_log", A_log, (heads,))
    check.shape("dt_bias", dt_bias, (heads,))
    check.shape("d_cache", d_cache, (d_cache.shape[0], heads, ring, dim))
    check.shape("k_cache", k_cache, (k_cache.shape[0], key_heads, ring, state_dim))
    check.shape("g_cache", g_cache, (g_cache.shape[0], heads, ring))
    if out.numel() != tokens * heads * dim:
        check.fail("out", f"shape {(tokens, heads, dim)}", tuple(out.shape))
    check.contiguous("out", out)
    check.rank("ssm_state_indices", indices, 1)
    check.rank("write_pos", write_pos, 1)
    check.dtype("write_pos", write_pos, torch.int32)
    check.dtype("ssm_state_indices", indices, *check.INDICES)
    check.dtype("g_cache", g_cache, torch.float32)
    floats = {
        "mixed_qkv": mixed_qkv, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias,
        state_name: state, "d_cache": d_cache, "k_cache": k_cache, "out": out,
    }  # fmt: skip
    check.floats(**floats)
    check.unit_stride(mixed_qkv=mixed_qkv, d_cache=d_cache, k_cache=k_cache, **{state_name: state})
    check.same_device(
        state.device, **floats, g_cache=g_cache, ssm_state_indices=indices, write_pos=write_pos
    )


def fused_recurrent_gated_delta_rule_replayssm(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out,
    ssm_state_indices, write_pos, use_qk_l2norm_in_kernel=False, block_v=None, num_warps=None,
    num_stages=None, nk=None,
):  # fmt: skip
    """One token per row over the cached d, k and g; returns (out, initial_state).

    A row flushes where write_pos is the caches' length - 1. block_v, num_warps, num_stages and nk,
    the originals' launch configuration, are not read.
    """
    _check(
        "initial_state", mixed_qkv, a, b, A_log, dt_bias, initial_state, d_cache, k_cache,
        g_cache, out, ssm_state_indices, write_pos,
    )  # fmt: skip
    batch = mixed_qkv.shape[0]
    check.at_least("ssm_state_indices", ssm_state_indices, batch)
    check.at_least("write_pos", write_pos, batch)
    _single(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out,
        ssm_state_indices[:batch], write_pos, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, initial_state


def gdn_replayssm_spec_decode(
    mixed_qkv, a, b, A_log, dt_bias, checkpoint_state, d_cache, k_cache, g_cache, out,
    query_start_loc, ssm_state_indices, write_pos, cache_base, is_flush, max_cache_len,
    max_spec_len, scale=None, use_qk_l2norm_in_kernel=True, null_block_id=0, launch_mode="both",
):  # fmt: skip
    """One verify window per row over the ring of d, k and g; returns `out`.

    Cursors go by slot and are moved by commit_gdn_replayssm_spec. launch_mode "verify" and "flush"
    take the rows without and with is_flush alone.
    """
    _check(
        "checkpoint_state", mixed_qkv, a, b, A_log, dt_bias, checkpoint_state, d_cache, k_cache,
        g_cache, out, ssm_state_indices, write_pos,
    )  # fmt: skip
    check.rank("query_start_loc", query_start_loc, 1)
    check.at_least("query_start_loc", query_start_loc, 1)
    ring, batch = d_cache.shape[2], query_start_loc.shape[0] - 1
    check.power_of_two("d_cache.shape[2]", ring)
    check.window("max_spec_len", max_spec_len, max_cache_len, ring)
    check.at_least("ssm_state_indices", ssm_state_indices, batch)
    check.dtype("query_start_loc", query_start_loc, *check.INDICES)
    check.dtype("cache_base", cache_base, torch.int32)
    check.dtype("is_flush", is_flush, torch.int8, torch.bool)
    for name, x in (("cache_base", cache_base), ("is_flush", is_flush)):
        check.rank(name, x, 1)
    check.same_device(
        checkpoint_state.device, query_start_loc=query_start_loc, cache_base=cache_base,
        is_flush=is_flush,
    )  # fmt: skip
    if launch_mode not in _PARTS:
        check.fail("launch_mode", " or ".join(_PARTS), launch_mode)
    if mixed_qkv.shape[0] == 0:
        return out
    if scale is None:
        scale = checkpoint_state.shape[-1] ** -0.5
    _window(
        mixed_qkv, a, b, A_log, dt_bias, scale, checkpoint_state, d_cache, k_cache, g_cache, out,
        ssm_state_indices[:batch], query_start_loc, write_pos, cache_base, is_flush, max_spec_len,
        use_qk_l2norm_in_kernel, null_block_id, _PARTS[launch_mode],
    )  # fmt: skip
    return out
