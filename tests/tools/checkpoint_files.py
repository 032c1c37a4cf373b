"""safetensors files and rearrangements of their tensors, independent of the engine."""

import array
import json
import struct

RANDOM = "tests/golden/random/"
WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8}


class Tensor:
    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, list(shape), bytes(data)

    def rows(self, first, count):
        size = len(self.data) // self.shape[0]
        return self.data[first * size : (first + count) * size]


def read_safetensors(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    data = raw[8 + length :]
    return {
        name: Tensor(t["dtype"], t["shape"], data[t["data_offsets"][0] : t["data_offsets"][1]])
        for name, t in header.items()
    }


def write_safetensors(path, tensors, alignment=8, skew=0):
    """`skew` makes the data start that many bytes past a multiple of `alignment`."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, t in tensors.items():
        assert len(t.data) == WIDTH[t.dtype] * product(t.shape), name
        header[name] = {
            "dtype": t.dtype,
            "shape": t.shape,
            "data_offsets": [offset, offset + len(t.data)],
        }
        offset += len(t.data)
    text = json.dumps(header).encode()
    text += b" " * ((skew - len(text)) % alignment)
    path.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(t.data for t in tensors.values())
    )


def product(shape):
    n = 1
    for size in shape:
        n *= size
    return n


def write_shards(folder, tensors, count):
    names, weight_map = list(tensors), {}
    for i in range(count):
        shard = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = names[i::count]
        write_safetensors(folder / shard, {n: tensors[n] for n in part})
        weight_map.update({n: shard for n in part})
    total = sum(len(t.data) for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# --- element types ---------------------------------------------------------------------------


def to_float32(t):
    if t.dtype != "BF16":
        return t
    return Tensor(
        "F32", t.shape, array.array("I", (x << 16 for x in array.array("H", t.data))).tobytes()
    )


def half_table():
    """The fp16 bits of every bf16 value that fp16 holds exactly."""
    table = {}
    for bits in range(1 << 16):
        (value,) = struct.unpack("<f", struct.pack("<I", bits << 16))
        try:
            half = struct.pack("<e", value)
        except (OverflowError, ValueError):
            continue
        if struct.unpack("<e", half)[0] == value:
            table[bits] = struct.unpack("<H", half)[0]
    return table


HALF = half_table()


def to_float16(t):
    """Unchanged where fp16 would round."""
    if t.dtype != "BF16":
        return t
    bits = array.array("H", t.data)
    if not all(x in HALF for x in bits):
        return t
    return Tensor("F16", t.shape, array.array("H", (HALF[x] for x in bits)).tobytes())


def scaled(t, factor):
    """Times a power of two, which bf16 and float32 hold exactly."""
    values = array.array("f", to_float32(t).data)
    bits = array.array("I", array.array("f", (x * factor for x in values)).tobytes())
    if t.dtype != "BF16":
        return Tensor(t.dtype, t.shape, bits.tobytes())
    assert all(x & 0xFFFF == 0 for x in bits)
    return Tensor(t.dtype, t.shape, array.array("H", (x >> 16 for x in bits)).tobytes())


def scaled_rows(t, blocks):
    """Blocks of rows, (count, factor) each, times their factors."""
    data, first = b"", 0
    for count, factor in blocks:
        shape = [count] + t.shape[1:]
        data += scaled(Tensor(t.dtype, shape, t.rows(first, count)), factor).data
        first += count
    assert first == t.shape[0]
    return Tensor(t.dtype, t.shape, data)


# --- tensor rearrangements -------------------------------------------------------------------


def renamed(tensors, *pairs):
    out = {}
    for name, t in tensors.items():
        for old, new in pairs:
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        out[name] = t
    return out


def fused_experts(tensors, gated, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    out, experts = {}, {}
    for name, t in tensors.items():
        head, found, tail = name.partition(".experts.")
        if not found:
            out[name] = t
            continue
        index, kind, _ = tail.split(".")
        experts.setdefault(head + ".experts.", {}).setdefault(int(index), {})[kind] = t
    for head, members in experts.items():
        inputs = [gate, up] if gated else [up]
        intermediate, width = members[0][up].shape
        order = sorted(members)
        data = b"".join(members[i][kind].data for i in order for kind in inputs)
        dtype = members[0][up].dtype
        name = "gate_up_proj" if gated else "up_proj"
        out[head + name] = Tensor(dtype, [len(order), len(inputs) * intermediate, width], data)
        data = b"".join(members[i][down].data for i in order)
        out[head + "down_proj"] = Tensor(dtype, [len(order), width, intermediate], data)
    return out


def separate_experts(tensors, joined, down, names):
    """Tensors over all experts, `joined` holding gate and up, as one tensor per expert: `names` are
    those of gate, up and down."""
    out = {}
    for name, t in tensors.items():
        if not name.endswith((joined, down)):
            out[name] = t
            continue
        is_down = name.endswith(down)
        head = name[: -len(down if is_down else joined)]
        experts, rows, width = t.shape
        for i in range(experts):
            data = t.rows(i, 1)
            parts = 1 if is_down else 2
            for p in range(parts):
                piece = data[p * len(data) // parts : (p + 1) * len(data) // parts]
                kind = names[2] if is_down else names[p]
                out[f"{head}experts.{i}.{kind}.weight"] = Tensor(
                    t.dtype, [rows // parts, width], piece
                )
    return out


def gated_delta_sizes(config):
    key_heads = config["linear_num_key_heads"]
    ratio = config["linear_num_value_heads"] // key_heads
    return key_heads, config["linear_key_head_dim"], ratio, ratio * config["linear_value_head_dim"]


def interleaved(tensors, config):
    """Qwen3.5 -> Qwen3-Next."""
    heads, dk, ratio, values = gated_delta_sizes(config)
    out = {}
    for name, t in tensors.items():
        prefix = name[: name.rfind("in_proj_")]
        if name.endswith(("in_proj_z.weight", "in_proj_a.weight")):
            continue
        if name.endswith("in_proj_qkv.weight"):
            z = tensors[prefix + "in_proj_z.weight"]
            data = b"".join(
                t.rows(g * dk, dk)
                + t.rows(heads * dk + g * dk, dk)
                + t.rows(2 * heads * dk + g * values, values)
                + z.rows(g * values, values)
                for g in range(heads)
            )
            shape = [t.shape[0] + z.shape[0], t.shape[1]]
            out[prefix + "in_proj_qkvz.weight"] = Tensor(t.dtype, shape, data)
        elif name.endswith("in_proj_b.weight"):
            a = tensors[prefix + "in_proj_a.weight"]
            data = b"".join(
                t.rows(g * ratio, ratio) + a.rows(g * ratio, ratio) for g in range(heads)
            )
            out[prefix + "in_proj_ba.weight"] = Tensor(t.dtype, [2 * t.shape[0], t.shape[1]], data)
        else:
            out[name] = t
    return out


def separated(tensors, config):
    """Qwen3-Next -> Qwen3.5."""
    heads, dk, ratio, values = gated_delta_sizes(config)
    stride = 2 * dk + 2 * values
    out = {}

    def put(name, source, pieces):
        data = b"".join(source.rows(first, count) for first, count in pieces)
        out[name] = Tensor(source.dtype, [sum(c for _, c in pieces), source.shape[1]], data)

    for name, t in tensors.items():
        prefix = name[: name.rfind("in_proj_")]
        each = range(heads)
        if name.endswith("in_proj_qkvz.weight"):
            q = [(g * stride, dk) for g in each]
            k = [(g * stride + dk, dk) for g in each]
            v = [(g * stride + 2 * dk, values) for g in each]
            put(prefix + "in_proj_qkv.weight", t, q + k + v)
            put(
                prefix + "in_proj_z.weight",
                t,
                [(g * stride + 2 * dk + values, values) for g in each],
            )
        elif name.endswith("in_proj_ba.weight"):
            put(prefix + "in_proj_b.weight", t, [(2 * g * ratio, ratio) for g in each])
            put(prefix + "in_proj_a.weight", t, [((2 * g + 1) * ratio, ratio) for g in each])
        else:
            out[name] = t
    return out


def one_group(tensors, config):
    """A mamba2 checkpoint with the first of its B / C groups only: another model."""
    inner, state = config["num_heads"] * config["head_dim"], config["state_size"]
    groups, heads = config["n_groups"], config["num_heads"]
    bc = inner + groups * state
    channels = [(0, inner), (inner, state), (bc, state)]
    projected = (
        [(0, inner)]
        + [(inner + a, n) for a, n in channels]
        + [(inner + bc + groups * state, heads)]
    )
    out = {}
    for name, t in tensors.items():
        pieces = projected if "in_proj" in name else channels if "conv1d" in name else None
        if pieces:
            data = b"".join(t.rows(a, n) for a, n in pieces)
            t = Tensor(t.dtype, [sum(n for _, n in pieces)] + t.shape[1:], data)
        out[name] = t
    return out


def flat_filters(tensors):
    return {
        n: Tensor(t.dtype, [t.shape[0], t.shape[2]], t.data) if "conv1d.weight" in n else t
        for n, t in tensors.items()
    }


# --- configurations --------------------------------------------------------------------------


def without(config, *keys):
    return {k: v for k, v in config.items() if k not in keys}


def with_keys_renamed(config, names):
    return {names.get(k, k): v for k, v in config.items()}


def bare_floats(config):
    """Python's json writes Infinity bare."""
    if isinstance(config, dict):
        if list(config) == ["__float__"]:
            return float(config["__float__"])
        return {k: bare_floats(v) for k, v in config.items()}
    return [bare_floats(v) for v in config] if isinstance(config, list) else config
