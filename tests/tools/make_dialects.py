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
    RANDOM,
    Tensor,
    bare_floats,
    flat_filters,
    fused_experts,
    interleaved,
    one_group,
    read_safetensors,
    renamed,
    separated,
    to_float16,
    to_float32,
    with_keys_renamed,
    without,
    write_safetensors,
    write_shards,
)
from dialects_of_hybrids import bamba, falcon_h1, granite, kimi

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

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


# A writer of dialects of one checkpoint.
def dialects_of(w, prefix, source, tensors):
    def write(name, c, t=None, **more):
        w.write(prefix + name, source, c, t or tensors, **more)

    return write


def nemotron_h_configs(config, write):
    pattern = pattern_of(config)
    plain = without(config, "layers_block_type")
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


def nemotron_h_tensors(config, tensors, write):
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
    write("mtp", dict(config, num_nextn_predict_layers=0), {**tensors, **mtp}, skipped=2)


def nemotron_h(w):
    source = RANDOM + "nemotron_h_moe"
    config, tensors = w.load(source)
    write = dialects_of(w, "nemotron_h_", source, tensors)
    nemotron_h_configs(config, write)
    nemotron_h_tensors(config, tensors, write)

    source = RANDOM + "nemotron_h_latent_moe_headdim80"
    config, tensors = w.load(source)
    write = dialects_of(w, "nemotron_h_", source, tensors)
    pattern = pattern_of(config)
    write(
        "latent_pattern",
        bare_floats(dict(without(config, "layers_block_type"), hybrid_override_pattern=pattern)),
    )
    write("latent_fused_sharded", config, fused_experts(tensors, gated=False), shards=2)

    source = "models/tiny-nemotron-h"
    config, tensors = w.load(source)
    write = dialects_of(w, "nemotron_h_", source, tensors)
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
