#!/usr/bin/env python3
"""Derives every published dialect of the supported checkpoints from the ones in the repository.

    make_dialects.py OUT        writes OUT/<fixture>/ and OUT/manifest.json

Each fixture states the same model in other words: other tensor names, fused or interleaved
projections, other element types, shards, other configuration keys. A manifest entry has

    name            the fixture and its folder
    source          the folder it was derived from, in the repository ("fixture:NAME": in OUT)
    golden          the reference record whose logits it must reproduce, or null
    expect          "same" = weights and logits of the source; "same logits" = multipliers that the
                    weights take back; "different logits" = the same weights, another mathematics
                    (see note)
    skipped         how many of its tensors text generation leaves out
    same_types      false where element types were converted (the values are the same)

Needs nothing but the standard library.
"""

import json
import pathlib
import shutil
import sys

from checkpoint_files import (
    Tensor,
    flat_filters,
    fused_experts,
    interleaved,
    one_group,
    read_safetensors,
    renamed,
    scaled,
    scaled_rows,
    separate_experts,
    separated,
    to_float16,
    to_float32,
    write_safetensors,
    write_shards,
)

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
RANDOM = "tests/golden/random/"

VISION = {
    "model.visual.patch_embed.proj.weight": Tensor("BF16", [4, 3, 2, 2], bytes(96)),
    "model.visual.blocks.0.attn.qkv.bias": Tensor("F32", [12], bytes(48)),
    "model.visual.position_ids": Tensor("I64", [5], bytes(40)),
}


# --- configurations --------------------------------------------------------------------------

BLOCK_TYPE = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
V5_BLOCK_TYPE = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def pattern_of(config):
    letter = {name: c for table in (BLOCK_TYPE, V5_BLOCK_TYPE) for c, name in table.items()}
    return "".join(letter[name] for name in config["layers_block_type"])


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


def nested(config, outer_type):
    text = dict(config, model_type=outer_type + "_text")
    return {
        "model_type": outer_type,
        "text_config": text,
        "tie_word_embeddings": config["tie_word_embeddings"],
        "vision_config": {"depth": 1, "hidden_size": 8, "model_type": outer_type},
        "image_token_id": 5,
    }


def original_mamba2(config, vocab_size, multiple):
    return {
        "d_model": config["hidden_size"],
        "d_intermediate": 0,
        "n_layer": config["num_hidden_layers"],
        "vocab_size": vocab_size,
        "ssm_cfg": {
            "layer": "Mamba2",
            "d_state": config["state_size"],
            "headdim": config["head_dim"],
            "ngroups": config["n_groups"],
        },
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": multiple,
        "tie_embeddings": config["tie_word_embeddings"],
    }


# --- fixtures --------------------------------------------------------------------------------


class Writer:
    def __init__(self, out):
        self.out, self.manifest = out, []
        out.mkdir(parents=True, exist_ok=True)

    def load(self, source):
        folder = REPOSITORY / source
        return json.loads((folder / "config.json").read_text()), read_safetensors(
            folder / "model.safetensors"
        )

    def write(self, name, source, config, tensors, shards=0, skew=0, **facts):
        folder = self.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        if shards:
            write_shards(folder, tensors, shards)
        else:
            write_safetensors(folder / "model.safetensors", tensors, skew=skew)
        record = None
        if not source.startswith("fixture:"):
            for file in (REPOSITORY / source).glob("*.json"):
                if file.name not in ("config.json", "golden.json"):
                    shutil.copy(file, folder)
            record = source + "/golden.json"
            if source.startswith("models/"):
                record = source.replace("models/", "tests/golden/") + ".json"
        entry = {"name": name, "source": source, "golden": record, "expect": "same", "skipped": 0}
        self.manifest.append({**entry, "same_types": True, "note": "", **facts})

    def finish(self):
        (self.out / "manifest.json").write_text(json.dumps({"fixtures": self.manifest}, indent=1))


def nemotron_h(w):
    source = RANDOM + "nemotron_h_moe"
    config, tensors = w.load(source)
    pattern = pattern_of(config)
    plain = without(config, "layers_block_type")

    def write(name, c, t=None, **more):
        w.write("nemotron_h_" + name, source, c, t or tensors, **more)

    write(
        "pattern_only", dict(plain, hybrid_override_pattern=pattern, num_hidden_layers=len(pattern))
    )
    write(
        "block_types",
        dict(plain, layers_block_type=[BLOCK_TYPE[c] for c in pattern], num_hidden_layers=None),
    )
    write("both", bare_floats(dict(config, hybrid_override_pattern=pattern)))
    aliases = {
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
        "time_step_limit": "mamba_dt_limit",
        "head_dim": "attention_head_dim",
        "layer_norm_epsilon": "norm_eps",
        "dtype": "torch_dtype",
    }
    inert = {
        "rope_theta": 10000,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": config["layer_norm_epsilon"],
    }
    write("aliases", dict(with_keys_renamed(config, aliases), **inert))
    write("architecture_only", without(config, "model_type"))
    write("model_prefix", config, renamed(tensors, ("backbone.", "model.")))
    write("model_backbone_prefix", config, renamed(tensors, ("backbone.", "model.backbone.")))
    wrapped = renamed(
        tensors, ("backbone.", "language_model.backbone."), ("lm_head.", "language_model.lm_head.")
    )
    write("wrapped", config, wrapped)
    write("fused_experts", config, fused_experts(tensors, gated=False))
    write("sharded", config, tensors, shards=3)
    write("one_shard", config, tensors, shards=1)
    write(
        "float32",
        dict(config, dtype="float32"),
        {n: to_float32(t) for n, t in tensors.items()},
        same_types=False,
    )
    write(
        "float16",
        dict(config, dtype="float16"),
        {n: to_float16(t) for n, t in tensors.items()},
        same_types=False,
    )
    mtp = {
        "mtp.layers.0.norm.weight": Tensor("BF16", [64], bytes(128)),
        "mtp.layers.0.eh_proj.weight": Tensor("BF16", [64, 128], bytes(16384)),
    }
    write("mtp", dict(config, num_nextn_predict_layers=1), {**tensors, **mtp}, skipped=2)

    source = RANDOM + "nemotron_h_latent_moe_headdim80"
    config, tensors = w.load(source)
    pattern = pattern_of(config)
    write(
        "latent_pattern",
        bare_floats(dict(without(config, "layers_block_type"), hybrid_override_pattern=pattern)),
    )
    write("latent_fused_sharded", config, fused_experts(tensors, gated=False), shards=2)

    source = "models/tiny-nemotron-h"
    config, tensors = w.load(source)
    write("tiny_pattern_sharded", without(config, "layers_block_type"), tensors, shards=4)
    write(
        "tiny_block_types_float32",
        without(config, "hybrid_override_pattern"),
        {n: to_float32(t) for n, t in tensors.items()},
        same_types=False,
    )


def mamba2(w):
    source = RANDOM + "mamba2"
    config, tensors = w.load(source)

    def write(name, c, t=None, **more):
        w.write("mamba2_" + name, more.pop("source", source), c, t or tensors, **more)

    write("bare_infinity", bare_floats(config))
    write("model_backbone_prefix", config, renamed(tensors, ("backbone.", "model.backbone.")))
    write("no_architectures", without(config, "architectures"))
    write(
        "both_key_sets",
        dict(
            config, d_model=config["hidden_size"], n_layer=config["num_hidden_layers"], ssm_cfg={}
        ),
    )
    write("flat_filters", config, flat_filters(tensors))
    head = {"lm_head.weight": tensors["backbone.embeddings.weight"]}
    write("stored_head", config, {**tensors, **head}, skipped=1)
    write(
        "float32",
        dict(config, dtype="float32"),
        {n: to_float32(t) for n, t in tensors.items()},
        same_types=False,
    )

    def original(t):
        t = renamed(t, ("backbone.embeddings.", "backbone.embedding."))
        return {**t, "lm_head.weight": t["backbone.embedding.weight"]}

    note = "the original dialect normalises the gated output per group, Hugging Face's over all channels"
    write(
        "original_two_groups",
        original_mamba2(config, 256, 8),
        original(tensors),
        golden=None,
        expect="different logits",
        skipped=1,
        note=note,
    )
    single, first = dict(config, n_groups=1), one_group(tensors, config)
    write(
        "one_group",
        single,
        first,
        source="fixture:mamba2_one_group",
        golden=None,
        note="another model: the first group only",
    )
    note = "one group, where both dialects mean the same; 250 tokens padded to 256"
    write(
        "original",
        original_mamba2(single, 250, 16),
        original(first),
        source="fixture:mamba2_one_group",
        golden=None,
        skipped=1,
        note=note,
    )


def qwen(w):
    source = RANDOM + "qwen3_5_text"
    config, tensors = w.load(source)
    interval = without(config, "layer_types")

    def write(name, c, t=None, **more):
        w.write("qwen_" + name, source, c, t or tensors, **more)

    def multimodal(t):
        return {**renamed(t, ("model.", "model.language_model.")), **VISION}

    write("interval", dict(interval, full_attention_interval=4))
    write("default_interval", interval)
    write("misaligned", config, tensors, skew=3)
    write("nested", nested(config, "qwen3_5"), multimodal(tensors), skipped=3)
    write("nested_sharded", nested(config, "qwen3_5"), multimodal(tensors), shards=2, skipped=3)
    write("flat_outer_type", dict(config, model_type="qwen3_5"))
    wrapped = renamed(
        tensors, ("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")
    )
    write("wrapped", config, wrapped)
    write("float32", config, {n: to_float32(t) for n, t in tensors.items()}, same_types=False)
    write("float16", config, {n: to_float16(t) for n, t in tensors.items()}, same_types=False)
    flat_rope = dict(without(config, "rope_parameters"), rope_theta=1e7, partial_rotary_factor=0.25)
    next_keys = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    every_layer = list(range(config["num_hidden_layers"]))
    dense_next = dict(
        flat_rope, **next_keys, num_experts=4, num_experts_per_tok=2, mlp_only_layers=every_layer
    )
    write("next_from_dense", dense_next, interleaved(tensors, config))

    source = RANDOM + "qwen3_5_moe_text"
    config, tensors = w.load(source)
    fused = fused_experts(tensors, gated=True)
    write("fused_experts", config, fused)
    write("nested_fused", nested(config, "qwen3_5_moe"), multimodal(fused), skipped=3)
    write("next_from_moe", dict(config, **next_keys), interleaved(tensors, config))

    source = RANDOM + "qwen3_next"
    config, tensors = w.load(source)
    write("moe_from_next", dict(config, model_type="qwen3_5_moe_text"), separated(tensors, config))
    write(
        "next_fused_interval",
        dict(without(config, "layer_types"), full_attention_interval=4),
        fused_experts(tensors, gated=True),
    )

    source = "models/tiny-qwen3.5"
    config, tensors = w.load(source)
    write(
        "tiny_nested_sharded", nested(config, "qwen3_5"), multimodal(tensors), shards=3, skipped=3
    )
    write("tiny_next", dict(config, **next_keys, num_experts=0), interleaved(tensors, config))


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
    write(
        "scaled", scaled_config, falcon_scaled(tensors, config), expect="same logits", note=note
    )


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
        return {n: Tensor(x.dtype, shape, x.data) if n.endswith(suffix) else x for n, x in t.items()}

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


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    writer = Writer(pathlib.Path(sys.argv[1]))
    nemotron_h(writer)
    mamba2(writer)
    qwen(writer)
    bamba(writer)
    falcon_h1(writer)
    granite(writer)
    kimi(writer)
    writer.finish()


if __name__ == "__main__":
    main()
