"""The cursors of verify windows, by block: commit after acceptance, reset at the first decode."""

import torch

from . import _checks as check
from . import _library as lib
from ._tensors import call, define, integers


def _cursors(write_pos, origin, is_flush, indices, threshold, window, ring, null_block_id):
    return lib.PagedCursors(
        sequences=indices.shape[0],
        slot=lib.Integers(*integers(indices)),
        null_slot=null_block_id,
        write_pos=write_pos.data_ptr(),
        origin=origin.data_ptr(),
        is_flush=is_flush.data_ptr(),
        write_pos_stride=write_pos.stride(0),
        origin_stride=origin.stride(0),
        is_flush_stride=is_flush.stride(0),
        threshold=threshold,
        max_window=window,
        ring=ring,
    )


def _run(name):
    def run(write_pos, origin, is_flush, rows, indices, threshold, window, ring, null_block_id):
        if indices.shape[0] == 0:
            return
        check.slots(
            "state_batch_indices", indices, null_block_id, write_pos=write_pos, origin=origin,
            is_flush=is_flush,
        )  # fmt: skip
        cursors = _cursors(
            write_pos, origin, is_flush, indices, threshold, window, ring, null_block_id
        )
        call(name, write_pos.device, cursors, lib.Integers(*integers(rows)))

    return run


_SCHEMA = (
    "(Tensor(a!) write_pos, Tensor(b!) origin, Tensor(c!) is_flush, Tensor rows, "
    "Tensor state_batch_indices, int max_cache_len, int max_spec_len, int cache_buf_len, "
    "int null_block_id) -> ()"
)
_commit = define("window_commit" + _SCHEMA, _run("paged_commit"))
_reset = define("window_reset" + _SCHEMA, _run("paged_reset"))


def _next_power_of_two(x):
    return 1 if x <= 1 else 1 << (x - 1).bit_length()


def _check(names, write_pos, origin, is_flush, rows, indices, ring):
    origin_name, rows_name = names
    check.dtype("write_pos", write_pos, torch.int32)
    check.dtype(origin_name, origin, torch.int32)
    check.dtype("is_flush", is_flush, torch.int8, torch.bool)
    check.dtype("state_batch_indices", indices, *check.INDICES)
    check.dtype(rows_name, rows, *check.FLAGS)
    check.rank("state_batch_indices", indices, 1)
    check.at_least(rows_name, rows, indices.shape[0])
    for name, x in (("write_pos", write_pos), (origin_name, origin), ("is_flush", is_flush)):
        check.rank(name, x, 1)
    check.power_of_two("cache_buf_len", ring)
    check.same_device(
        write_pos.device,
        **{origin_name: origin, "is_flush": is_flush, rows_name: rows},
        state_batch_indices=indices,
    )


def commit(
    names, write_pos, origin, is_flush, accepted, indices, threshold, window, ring, null_block_id
):
    ring = ring or _next_power_of_two(threshold)
    _check(names, write_pos, origin, is_flush, accepted, indices, ring)
    _commit(write_pos, origin, is_flush, accepted, indices, threshold, window, ring, null_block_id)


def reset(names, write_pos, origin, is_flush, first, indices, threshold, window, null_block_id):
    ring = _next_power_of_two(threshold)
    _check(names, write_pos, origin, is_flush, first, indices, ring)
    _reset(write_pos, origin, is_flush, first, indices, threshold, window, ring, null_block_id)


def commit_replayssm_spec(
    write_pos, post_conv_state_pos, is_flush, num_accepted_tokens, state_batch_indices,
    max_cache_len, max_spec_len, cache_buf_len=None, null_block_id=0,
):  # fmt: skip
    """Moves the cursors once per step; num_accepted_tokens includes the bonus token."""
    commit(
        ("post_conv_state_pos", "num_accepted_tokens"), write_pos, post_conv_state_pos, is_flush,
        num_accepted_tokens, state_batch_indices, max_cache_len, max_spec_len, cache_buf_len,
        null_block_id,
    )  # fmt: skip


def reset_replayssm_spec_cursors(
    write_pos, post_conv_state_pos, is_flush, first_decode_mask, state_batch_indices,
    max_cache_len, max_spec_len, null_block_id=0,
):  # fmt: skip
    """Rows with first_decode_mask start with an empty ring."""
    reset(
        ("post_conv_state_pos", "first_decode_mask"), write_pos, post_conv_state_pos, is_flush,
        first_decode_mask, state_batch_indices, max_cache_len, max_spec_len, null_block_id,
    )  # fmt: skip


def commit_gdn_replayssm_spec(
    write_pos, cache_base, is_flush, num_accepted, state_batch_indices, max_cache_len,
    max_spec_len, cache_buf_len=None, null_block_id=0,
):  # fmt: skip
    """Moves the cursors once per step; num_accepted includes the bonus token."""
    commit(
        ("cache_base", "num_accepted"), write_pos, cache_base, is_flush, num_accepted,
        state_batch_indices, max_cache_len, max_spec_len, cache_buf_len, null_block_id,
    )  # fmt: skip


def reset_gdn_replayssm_spec_cursors(
    write_pos, cache_base, is_flush, do_reset, state_batch_indices, max_cache_len, max_spec_len,
    null_block_id=0,
):  # fmt: skip
    """Rows with do_reset start with an empty ring."""
    reset(
        ("cache_base", "do_reset"), write_pos, cache_base, is_flush, do_reset,
        state_batch_indices, max_cache_len, max_spec_len, null_block_id,
    )  # fmt: skip
