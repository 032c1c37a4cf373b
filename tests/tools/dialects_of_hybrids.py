"""Dialects of Bamba, Falcon-H1, Granite 4 and Kimi-Linear. `w` writes fixtures (make_dialects.py)."""

from checkpoint_files import (
    RANDOM,
    Tensor,
    bare_floats,
    flat_filters,
    fused_experts,
    renamed,
    scaled,
    scaled_rows,
    separate_experts,
    to_float32,
    with_keys_renamed,
    without,
)


def with_names(config, key, linear, full):
    attention = config.get("attn_layer_indices")
    if attention is None:
        types = config["layer_types"]
        attention = [i for i, name in enumerate(types) if name == "full_attention"]
    names = [full if i in attention else linear for i in range(config["num_hidden_layers"])]
    return dict(without(config, "attn_layer_indices", "layer_types"), **{key: names})


def flat_rope(config, **more):
    theta = config["rope_parameters"]["rope_theta"]
    return dict(without(config, "rope_parameters"), rope_theta=theta, **more)


def bamba(w):
    source = RANDOM + "bamba"
    config, tensors = w.load(source)

    def write(name, c, t=None, **more):
        w.write("bamba_" + name, source, c, t or tensors, **more)

    names = with_names(config, "layer_types", "linear_attention", "full_attention")
    write("layer_types", names)
    write("layers_block_type", with_names(config, "layers_block_type", "mamba", "attention"))
    write("all_layer_keys", dict(names, **config, layers_block_type=names["layer_types"]))
    write("auto_head_dim", bare_floats(dict(config, mamba_d_head="auto")))
    rope = without(flat_rope(config), "partial_rotary_factor", "time_step_limit")
    write("flat_rope", dict(rope, attn_rotary_emb=8, rope_scaling=None))
    write("architecture_only", without(config, "model_type"))
    write("flat_filters_sharded", config, flat_filters(tensors), shards=2)
    write(
        "float32",
        dict(config, dtype="float32"),
        {n: to_float32(t) for n, t in tensors.items()},
        same_types=False,
    )


FALCON_SCALES = {
    "embedding_multiplier": 4.0,
    "lm_head_multiplier": 0.125,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.5,
    "key_multiplier": 0.25,
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 8.0,
    "ssm_multipliers": [2.0, 4.0, 0.5, 0.25, 8.0],
    "mlp_multipliers": [0.25, 16.0],
}


def falcon_scaled(tensors, config):
    """Weights that take FALCON_SCALES back."""
    f = FALCON_SCALES
    inner, heads = config["mamba_d_ssm"], config["mamba_n_heads"]
    shared = config["mamba_n_groups"] * config["mamba_d_state"]
    widths = [inner, inner, shared, shared, heads]
    factors = {
        "embed_tokens.weight": f["embedding_multiplier"],
        "lm_head.weight": f["lm_head_multiplier"],
        "q_proj.weight": f["attention_in_multiplier"],
        "k_proj.weight": f["attention_in_multiplier"] * f["key_multiplier"],
        "v_proj.weight": f["attention_in_multiplier"],
        "o_proj.weight": f["attention_out_multiplier"],
        "out_proj.weight": f["ssm_out_multiplier"],
        "gate_proj.weight": f["mlp_multipliers"][0],
        "down_proj.weight": f["mlp_multipliers"][1],
    }
    out = {}
    for name, t in tensors.items():
        suffix = ".".join(name.split(".")[-2:])
        if suffix == "in_proj.weight":
            scales = [1 / (f["ssm_in_multiplier"] * m) for m in f["ssm_multipliers"]]
            t = scaled_rows(t, zip(widths, scales))
        elif suffix in factors:
            t = scaled(t, 1 / factors[suffix])
        out[name] = t
    return out


def falcon_h1(w):
    source = RANDOM + "falcon_h1"
    config, tensors = w.load(source)

    def write(name, c, t=None, **more):
        w.write("falcon_h1_" + name, source, c, t or tensors, **more)

    hybrid = ["hybrid"] * config["num_hidden_layers"]
    write("layer_names", dict(config, layer_types=hybrid, layers_block_type=hybrid))
    write("auto_head_dim", bare_floats(dict(config, mamba_d_head="auto", mamba_d_ssm=None)))
    write("flat_rope", flat_rope(config, rope_scaling=None))
    plain = [k for k in config if k.endswith(("_multiplier", "_multipliers"))]
    write("no_multipliers", without(config, "head_dim", *plain), flat_filters(tensors))
    note = "every multiplier a power of two that the weights take back"
    scaled_config = dict(config, **FALCON_SCALES)
    write("scaled", scaled_config, falcon_scaled(tensors, config), expect="same logits", note=note)


def granite(w):
    source = RANDOM + "granitemoehybrid"
    config, tensors = w.load(source)

    def write(name, c, t=None, **more):
        w.write("granite_" + name, source, c, t or tensors, **more)

    write("published_names", with_names(config, "layer_types", "mamba", "attention"))
    write("layers_block_type", with_names(config, "layers_block_type", "mamba", "attention"))
    write(
        "no_position_embedding",
        bare_floats(dict(config, position_embedding_type=None, normalization_function="rmsnorm")),
    )
    write("auto_head_dim", flat_rope(dict(config, mamba_d_head="auto")), flat_filters(tensors))
    joined, down = "input_linear.weight", "output_linear.weight"
    in_moe, out_moe = "block_sparse_moe." + joined, "block_sparse_moe." + down
    fused = {
        n.replace(in_moe, "block_sparse_moe.experts.gate_up_proj")
        .replace(out_moe, "block_sparse_moe.experts.down_proj")
        .replace("router.layer.", "router."): t
        for n, t in tensors.items()
    }
    write("fused_experts", config, fused, shards=2)
    shared = {n: t for n, t in tensors.items() if "shared_mlp" in n}
    separate = separate_experts(
        {n: t for n, t in tensors.items() if "shared_mlp" not in n},
        joined,
        down,
        ("gate_proj", "up_proj", "down_proj"),
    )
    write("separate_experts", config, {**separate, **shared})


def published_kimi(config):
    """transformers' keys in the words of the published configuration."""
    types, mixes = config["layer_types"], config["mlp_layer_types"]
    numbers = {kind: [i + 1 for i, t in enumerate(types) if t == kind] for kind in set(types)}
    plain = without(config, "layer_types", "mlp_layer_types", "qk_head_dim")
    return {
        **{k: v for k, v in plain.items() if not k.startswith("linear_")},
        "linear_attn_config": {
            "head_dim": config["linear_head_dim"],
            "num_heads": config["linear_num_heads"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
            "kda_layers": numbers["linear_attention"],
            "full_attn_layers": numbers["full_attention"],
        },
        "first_k_dense_replace": mixes.index("sparse"),
        "moe_layer_freq": 1,
        "head_dim": 72,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "num_nextn_predict_layers": 0,
    }


def kimi(w):
    source = RANDOM + "kimi_linear"
    config, tensors = w.load(source)
    published = published_kimi(config)

    def write(name, c, t=None, **more):
        w.write("kimi_" + name, source, c, t or tensors, **more)

    def replaced(t, old, new):
        return {n.replace(old, new): x for n, x in t.items()}

    def reshaped(t, suffix, shape):
        return {
            n: Tensor(x.dtype, shape, x.data) if n.endswith(suffix) else x for n, x in t.items()
        }

    dense_mlp = renamed(tensors, ("model.layers.0.block_sparse_moe.", "model.layers.0.mlp."))
    write("published", published, dense_mlp)
    write("published_sharded", without(published, "model_type"), dense_mlp, shards=3)
    write("both", dict(published, **config))
    aliases = {
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "model_max_length": "max_position_embeddings",
    }
    write("aliases", with_keys_renamed(config, aliases))
    heads = config["linear_num_heads"]
    write("flat_filters", config, reshaped(flat_filters(tensors), "A_log", [heads]))
    write("tall_decay", published, reshaped(tensors, "A_log", [1, heads]))
    mlp = replaced(tensors, ".block_sparse_moe.", ".mlp.")
    write("mlp_prefix", config, mlp)
    fused = fused_experts(tensors, True, ("w1", "w3", "w2"))
    write("fused_experts", published, fused)
    write("mlp_fused_experts", config, replaced(fused, ".block_sparse_moe.", ".mlp."))
    named = tensors
    for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        named = replaced(named, f".{old}.weight", f".{new}.weight")
    write("named_experts", config, named)
    write(
        "float32",
        dict(published, dtype="float32"),
        {n: to_float32(t) for n, t in tensors.items()},
        same_types=False,
    )
