"""Bad arguments: refused before anything runs, naming tensor, what was expected and what came."""

import pytest
import torch

import replayssm
from harness import BF16, devices

HEADS, DIM, GROUPS, N, RING, BATCH, TOKENS = 4, 8, 2, 16, 8, 2, 3


def integers(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def mamba2_single():
    return {
        "state": torch.zeros(3, HEADS, DIM, N),
        "x": torch.zeros(BATCH, HEADS, DIM),
        "dt": torch.zeros(BATCH, HEADS, 1).expand(-1, -1, DIM),
        "A": torch.zeros(HEADS, 1, 1).expand(-1, DIM, N),
        "B": torch.zeros(BATCH, GROUPS, N),
        "C": torch.zeros(BATCH, GROUPS, N),
        "x_cache": torch.zeros(3, HEADS, RING, DIM),
        "dt_cache": torch.zeros(3, HEADS, RING),
        "B_cache": torch.zeros(3, GROUPS, RING, N),
        "write_pos": integers(0, 0),
        "is_flush": integers(0, 0, dtype=torch.int8),
        "max_cache_len": RING,
        "state_batch_indices": integers(1, 2),
        "out": torch.zeros(BATCH, HEADS, DIM),
    }


def mamba2_window():
    inner = HEADS * DIM
    return {
        "state_checkpoint": torch.zeros(3, HEADS, DIM, N),
        "post_conv_cache": torch.zeros(3, RING, inner + GROUPS * N),
        "dt_cache": torch.zeros(3, HEADS, RING),
        "conv_out": torch.zeros(TOKENS, inner + 2 * GROUPS * N),
        "dt_spec": torch.zeros(TOKENS, HEADS),
        "A": torch.zeros(HEADS, 1, 1).expand(-1, DIM, N),
        "write_pos": integers(0, 0, 0),
        "post_conv_state_pos": integers(0, 0, 0),
        "is_flush": integers(0, 0, 0, dtype=torch.int8),
        "query_start_loc": integers(0, 1, 3),
        "state_batch_indices": integers(1, 2),
        "max_cache_len": 6,
        "max_spec_len": 2,
        "d_inner": inner,
        "ngroups": GROUPS,
        "dstate": N,
    }


def gated_delta():
    width = 2 * GROUPS * N + HEADS * DIM
    return {
        "mixed_qkv": torch.zeros(BATCH, width),
        "a": torch.zeros(BATCH, HEADS),
        "b": torch.zeros(BATCH, HEADS),
        "A_log": torch.zeros(HEADS),
        "dt_bias": torch.zeros(HEADS),
        "scale": 1.0,
        "initial_state": torch.zeros(3, HEADS, DIM, N),
        "d_cache": torch.zeros(3, HEADS, RING, DIM),
        "k_cache": torch.zeros(3, GROUPS, RING, N),
        "g_cache": torch.zeros(3, HEADS, RING),
        "out": torch.zeros(BATCH, HEADS, DIM),
        "ssm_state_indices": integers(1, 2),
        "write_pos": integers(0, 0),
    }


def gated_delta_window():
    arguments = gated_delta()
    del arguments["scale"]
    arguments["checkpoint_state"] = arguments.pop("initial_state")
    return arguments | {
        "query_start_loc": integers(0, 1, 2),
        "write_pos": integers(0, 0, 0),
        "cache_base": integers(0, 0, 0),
        "is_flush": integers(0, 0, 0, dtype=torch.int8),
        "max_cache_len": 6,
        "max_spec_len": 2,
    }


def commit():
    return {
        "write_pos": integers(0, 0, 0),
        "post_conv_state_pos": integers(0, 0, 0),
        "is_flush": integers(0, 0, 0, dtype=torch.int8),
        "num_accepted_tokens": integers(1, 1),
        "state_batch_indices": integers(1, 2),
        "max_cache_len": 6,
        "max_spec_len": 2,
    }


CALLS = {
    "output_only": (replayssm.selective_state_update_replayssm_output_only, mamba2_single),
    "state_and_output": (
        replayssm.selective_state_update_replayssm_state_and_output,
        mamba2_single,
    ),
    "mamba2_spec": (replayssm.selective_state_update_replayssm_spec, mamba2_window),
    "gated_delta": (replayssm.fused_recurrent_gated_delta_rule_replayssm, gated_delta),
    "gated_delta_spec": (replayssm.gdn_replayssm_spec_decode, gated_delta_window),
    "commit": (replayssm.commit_replayssm_spec, commit),
}

WRONG = [
    ("output_only", "x", torch.zeros(BATCH, HEADS, 9), r"x: expected shape \(2, 4, 8\), got"),
    ("output_only", "A", torch.zeros(HEADS, DIM, N), "A: expected stride 0 in the last 2"),
    ("output_only", "dt", torch.zeros(BATCH, HEADS, DIM), "dt: expected stride 0 in the last 1"),
    ("output_only", "B", torch.zeros(BATCH, 3, N), "nheads 4, got 3"),
    ("output_only", "C", torch.zeros(BATCH, GROUPS, N, dtype=torch.int32), "C: expected dtype"),
    ("output_only", "x_cache", None, "x_cache: expected a tensor, got None"),
    ("output_only", "write_pos", integers(0), r"write_pos: expected shape \(n,\) with n >= 2"),
    ("output_only", "write_pos", integers(0, 0, dtype=torch.int64), "write_pos: expected dtype"),
    ("output_only", "is_flush", torch.zeros(2), "is_flush: expected dtype torch.bool or"),
    ("output_only", "max_cache_len", 7, r"x_cache: expected shape \(3, 4, 7, 8\), got"),
    ("output_only", "dt_cache", torch.zeros(3, HEADS, RING, dtype=BF16), "dt_cache: expected dty"),
    ("output_only", "out", torch.zeros(BATCH, HEADS, 2 * DIM)[:, :, ::2], "out: expected stride 1"),
    ("output_only", "x", torch.zeros(BATCH, HEADS, DIM, device="meta"), "x: expected device cpu"),
    ("state_and_output", "D", torch.zeros(HEADS), r"D: expected shape \(4, 8\), got"),
    ("mamba2_spec", "post_conv_cache", torch.zeros(3, 6, 64), "expected a power of two, got 6"),
    ("mamba2_spec", "max_cache_len", 9, "max_cache_len: expected at most the 8 rows"),
    ("mamba2_spec", "max_spec_len", 5, r"max_spec_len: expected 1 .. 4 for caches of 8 rows"),
    ("mamba2_spec", "d_inner", 31, r"d_inner: expected nheads \* dim 32, got 31"),
    ("mamba2_spec", "dt_spec", torch.zeros(TOKENS, 3), r"dt_spec: expected shape \(3, 4\), got"),
    ("mamba2_spec", "query_start_loc", integers(0, 3), r"query_start_loc: expected shape \(3,\)"),
    ("mamba2_spec", "query_start_loc", integers(0, 3, 3), r"query_start_loc\[1\]: expected 0 to 2"),
    ("mamba2_spec", "query_start_loc", integers(0, -1, 1), r"query_start_loc\[1\]: expected 0 to"),
    (
        "mamba2_spec",
        "query_start_loc",
        integers(0, 2, 4),
        "query_start_loc: expected tokens from 0",
    ),
    ("mamba2_spec", "state_batch_indices", integers(1, 3), "expected slots below the 3 of state"),
    ("mamba2_spec", "is_flush", integers(0, 0, dtype=torch.int8), "slots below the 2 of is_flush"),
    (
        "output_only",
        "state_batch_indices",
        integers(3, 1),
        "expected slots below the 3 of state, g",
    ),
    (
        "gated_delta",
        "ssm_state_indices",
        integers(1, 3),
        "expected slots below the 3 of state, got",
    ),
    ("gated_delta", "d_cache", torch.zeros(1, HEADS, RING, DIM), "below the 1 of d_cache, got 2"),
    ("gated_delta", "initial_state", torch.zeros(3, HEADS, DIM, 0), "at least one column"),
    ("gated_delta", "mixed_qkv", torch.zeros(BATCH, 97), r"mixed_qkv: expected shape \(tokens, 2"),
    ("gated_delta", "out", torch.zeros(BATCH, HEADS, 2 * DIM)[:, :, ::2], "out: expected a contig"),
    ("gated_delta", "g_cache", torch.zeros(3, HEADS, RING, dtype=BF16), "g_cache: expected dtype"),
    ("gated_delta", "k_cache", torch.zeros(3, 4, RING, N), r"k_cache: expected shape \(3, 2, 8"),
    ("gated_delta_spec", "launch_mode", "twice", "launch_mode: expected both or verify or flush"),
    ("gated_delta_spec", "cache_base", integers(0, dtype=torch.int64), "cache_base: expected dtyp"),
    ("gated_delta_spec", "query_start_loc", integers(), r"query_start_loc: expected shape \(n,\)"),
    ("gated_delta_spec", "ssm_state_indices", integers(9, 1), "slots below the 3 of state, got 9"),
    ("commit", "state_batch_indices", integers(1, 3), "slots below the 3 of write_pos, got 3"),
    ("commit", "num_accepted_tokens", integers(1), "num_accepted_tokens: expected shape"),
    ("commit", "post_conv_state_pos", torch.zeros(3), "post_conv_state_pos: expected dtype"),
    ("commit", "cache_buf_len", 6, "cache_buf_len: expected a power of two, got 6"),
]


@pytest.mark.parametrize("call,name,value,message", WRONG)
def test_wrong_arguments_are_named(call, name, value, message):
    function, arguments = CALLS[call]
    with pytest.raises(ValueError, match=message):
        function(**(arguments() | {name: value}))


@pytest.mark.parametrize("call", CALLS)
def test_the_same_calls_pass_otherwise(call):
    function, arguments = CALLS[call]
    function(**arguments())


def native_step(layer, state=None, **changes):
    state, cursors = state or layer.state(3, "cpu"), layer.cursors(3, "cpu")
    arguments = {
        "v": torch.zeros(BATCH, HEADS, DIM),
        "k": torch.zeros(BATCH, GROUPS, N),
        "q": torch.zeros(BATCH, GROUPS, N),
        "b": torch.zeros(BATCH, HEADS),
        "slot": integers(0, 1),
    }
    if layer.family == "kimi_delta":
        arguments["gate"] = torch.zeros(BATCH, HEADS, N)
        arguments |= {"gate_scale": torch.zeros(HEADS), "gate_bias": torch.zeros(HEADS, N)}
    else:
        arguments["g"] = torch.zeros(BATCH, HEADS)
    return layer.step(state, cursors, **(arguments | changes))


def recurrence(family="gated_delta", **changes):
    return replayssm.Recurrence(
        family, HEADS, GROUPS, DIM, N, **({"activation_dtype": torch.float32} | changes)
    )


@pytest.mark.parametrize(
    "family,changes,message",
    [
        ("gated_delta", {"slot": integers(0, 3)}, "slot: expected slots below the 3 of state"),
        ("gated_delta", {"slot": integers(0, 5, 1)[::2]}, "slot: expected a contiguous tensor"),
        ("gated_delta", {"slot": integers(0, 1).view(2, 1)}, r"slot: expected shape \(2,\), got"),
        ("gated_delta", {"query_start": integers(0, 1, 9)}, "query_start: expected tokens from 0"),
        ("gated_delta", {"state": recurrence(buffer_len=1).state(3, "cpu")}, "state.ring_v: exp"),
        ("kimi_delta", {"gate_bias": torch.zeros(1)}, r"gate_bias: expected shape \(4, 16\)"),
        ("kimi_delta", {"gate_scale": torch.zeros(HEADS, dtype=BF16)}, "gate_scale: expected dtyp"),
    ],
)
def test_wrong_arguments_of_the_native_step(family, changes, message):
    native_step(recurrence(family))
    with pytest.raises(ValueError, match=message):
        native_step(recurrence(family), **changes)


def test_a_single_token_may_have_any_stride():
    v = torch.ones(1, HEADS, DIM).as_strided((1, HEADS, DIM), (1, DIM, 1))
    x = {"k": torch.ones(1, GROUPS, N), "q": torch.ones(1, GROUPS, N), "b": torch.ones(1, HEADS)}
    native_step(recurrence(), v=v, g=torch.zeros(1, HEADS), slot=integers(1), **x)


@pytest.mark.parametrize(
    "method,arguments,message",
    [
        ("reset", (integers(0, 1, dtype=torch.int64),), "slot: expected dtype torch.int32"),
        ("reset", (integers(0, 3),), "slot: expected slots below the 3 of cursors, got 3"),
        ("folded", (integers(0, 5, 1)[::2],), "slot: expected a contiguous tensor"),
        ("prefilled", (integers(0, 1), integers(4)), r"tokens: expected shape \(2,\), got"),
        ("prefilled", (integers(0, 1), integers(4, -1)), "tokens: expected 0 or more, got -1"),
        ("begin", (integers(0, 3),), "slot: expected slots below the 3 of cursors, got 3"),
        ("begin", (integers(0, 1), integers(0)), r"query_start: expected shape \(3,\), got"),
        ("commit", (integers(0, 3), integers(1, 1)), "slot: expected slots below the 3 of curs"),
        ("commit", (integers(0, 1), integers(1, 2)), r"accepted\[1\]: expected 0 to 1 tokens, got"),
    ],
)
def test_wrong_arguments_of_cursors(method, arguments, message):
    cursors = recurrence().cursors(3, "cpu")
    before = cursors.data.clone()
    with pytest.raises(ValueError, match=message):
        getattr(cursors, method)(*arguments)
    assert torch.equal(cursors.data, before)


def test_rings_that_nobody_began_to_fold_are_refused():
    layer = recurrence(buffer_len=2)
    state, cursors = layer.state(3, "cpu"), layer.cursors(3, "cpu")
    slot = integers(0, 1)
    for _ in range(3):
        cursors.commit(slot, integers(1, 1))
    with pytest.raises(ValueError, match=r"cursors: expected rings of 0 .. 2 rows"):
        layer.fold(state, cursors, slot=slot)


@pytest.mark.parametrize("call", [name for name in CALLS if name != "commit"])
def test_empty_batches(call):
    function, make = CALLS[call]
    arguments = make()
    if "query_start_loc" in arguments:
        arguments["query_start_loc"] = integers(0)
    for name in ("x", "dt", "B", "C", "out", "conv_out", "dt_spec", "mixed_qkv", "a", "b"):
        if name in arguments:
            arguments[name] = arguments[name][:0]
    for name in ("state_batch_indices", "ssm_state_indices"):
        if name in arguments:
            arguments[name] = arguments[name][:0]
    function(**arguments)


@devices
def test_compiled_and_captured(device):
    """torch.compile traces the calls whole, a graph replays them."""
    function, make = CALLS["output_only"]
    arguments = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in make().items()
    }
    arguments["dt"] = torch.ones(BATCH, HEADS, 1, device=device).expand(-1, -1, DIM)
    arguments["A"] = torch.full((HEADS, 1, 1), -1.0, device=device).expand(-1, DIM, N)
    for name in ("x", "B", "C"):
        arguments[name] = torch.randn(arguments[name].shape, device=device)
    want = function(**arguments).clone() * 2
    written = ("x_cache", "dt_cache", "B_cache")
    again = {k: torch.zeros_like(v) if k in written else v for k, v in arguments.items()}
    compiled = torch.compile(lambda: function(**again) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), want)
    assert torch.equal(again["B_cache"], arguments["B_cache"]) and again["B_cache"].any()
    if device != "cuda":
        return
    arguments["out"].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(**arguments)
    graph.replay()
    assert torch.equal(arguments["out"] * 2, want)


def test_ops_pass_the_library_checks():
    """Schemas, fake implementations and aliasing, as PyTorch itself checks them."""
    window, arguments = CALLS["mamba2_spec"]
    values = arguments()
    out = torch.zeros(TOKENS, HEADS, DIM)
    torch.library.opcheck(
        torch.ops.replayssm.mamba2_window_step.default,
        (
            values["state_checkpoint"], values["post_conv_cache"], values["dt_cache"],
            values["conv_out"], values["dt_spec"], values["A"][:, 0, 0], values["write_pos"],
            values["post_conv_state_pos"], values["is_flush"], values["query_start_loc"],
            values["state_batch_indices"], 2, GROUPS, None, None, None, True, out, 0,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_traced_whole(call):
    function, make = CALLS[call]
    arguments = make()
    if call == "mamba2_spec":
        per_head = torch.zeros(HEADS, 1).expand(-1, DIM)
        arguments |= {"D": per_head, "dt_bias": per_head}
    torch.compile(lambda: function(**arguments), fullgraph=True, backend="aot_eager")()
