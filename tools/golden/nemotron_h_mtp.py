"""Makes the tiny random checkpoint with a Nemotron-3 Super draft head, and its record in float64.

    python3 tools/golden/nemotron_h_mtp.py tests/golden/random

The body is nemotron_h_latent_moe_headdim80, whose recorded logits the reference here must meet; the
head's weights are drawn, rounded to bfloat16. Needs numpy and `regex`.
"""

import json
import pathlib
import shutil
import struct
import sys

import numpy as np
from nemotron_h_reference import NemotronH, rms_norm

SOURCE, NAME = "nemotron_h_latent_moe_headdim80", "nemotron_h_mtp"
LETTER = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
DRAFTS, ROWS = 4, 12


def relu_squared(u, t, p):
    return np.maximum(u @ t[p + "up_proj.weight"].T, 0) ** 2 @ t[p + "down_proj.weight"].T


class Model(NemotronH):
    def moe(self, u, p):
        c, t = self.c, self.t
        scores = 1 / (1 + np.exp(-(u @ t[p + "gate.weight"].T)))
        chosen = np.argsort(-(scores + t[p + "gate.e_score_correction_bias"]), axis=1)
        latent = u @ t[p + "fc1_latent_proj.weight"].T
        routed = np.zeros_like(latent)
        for row, experts in enumerate(chosen[:, : c["num_experts_per_tok"]]):
            share = scores[row, experts] / scores[row, experts].sum() * c["routed_scaling_factor"]
            for expert, weight in zip(experts, share):
                routed[row] += weight * relu_squared(latent[row], t, f"{p}experts.{expert}.")
        return routed @ t[p + "fc2_latent_proj.weight"].T + relu_squared(
            u, t, p + "shared_experts."
        )

    def block(self, x, pattern, prefix):
        mixers = {"M": self.mamba, "*": self.attention, "E": self.moe}
        for layer, kind in enumerate(pattern):
            p = f"{prefix}{layer}."
            u = rms_norm(x, self.t[p + "norm.weight"], self.c["layer_norm_epsilon"])
            x = x + mixers.get(kind, lambda u, p: relu_squared(u, self.t, p))(u, p + "mixer.")
        return x

    def hidden(self, ids):
        """Behind the final norm: what the head reads."""
        x = self.block(
            self.t["backbone.embeddings.weight"][ids],
            self.c["hybrid_override_pattern"],
            "backbone.layers.",
        )
        return rms_norm(x, self.t["backbone.norm_f.weight"], self.c["layer_norm_epsilon"])

    def head(self, hidden, next_ids):
        """m of every position: its hidden state and the token behind it."""
        t, eps, p = self.t, self.c["layer_norm_epsilon"], "mtp.layers."
        both = np.concatenate(
            [
                rms_norm(t["backbone.embeddings.weight"][next_ids], t[p + "0.enorm.weight"], eps),
                rms_norm(hidden, t[p + "0.hnorm.weight"], eps),
            ],
            axis=1,
        )
        pattern = self.c["mtp_hybrid_override_pattern"]
        u = self.block(both @ t[p + "0.eh_proj.weight"].T, pattern, p)
        return rms_norm(u, t[f"{p}{len(pattern) - 1}.final_layernorm.weight"], eps)


def head_shapes(c):
    """Names and shapes of the head's tensors."""
    h, latent, experts = c["hidden_size"], c["moe_latent_size"], c["n_routed_experts"]
    q = c["num_attention_heads"] * c["head_dim"]
    kv = c["num_key_value_heads"] * c["head_dim"]
    attention, moe = "0.mixer.", "1.mixer."
    shapes = {
        "0.enorm.weight": [h],
        "0.hnorm.weight": [h],
        "0.eh_proj.weight": [h, 2 * h],
        "0.norm.weight": [h],
        attention + "q_proj.weight": [q, h],
        attention + "k_proj.weight": [kv, h],
        attention + "v_proj.weight": [kv, h],
        attention + "o_proj.weight": [h, q],
        "1.norm.weight": [h],
        moe + "gate.weight": [experts, h],
        moe + "gate.e_score_correction_bias": [experts],
        moe + "fc1_latent_proj.weight": [latent, h],
        moe + "fc2_latent_proj.weight": [h, latent],
        "1.final_layernorm.weight": [h],
    }
    widths = {f"experts.{i}.": (c["moe_intermediate_size"], latent) for i in range(experts)}
    widths["shared_experts."] = (c["moe_shared_expert_intermediate_size"], h)
    for name, (width, inputs) in widths.items():
        shapes[moe + name + "up_proj.weight"] = [width, inputs]
        shapes[moe + name + "down_proj.weight"] = [inputs, width]
    return {"mtp.layers." + name: shape for name, shape in shapes.items()}


def drawn(rng, name, shape):
    """Dtype and bytes of a tensor of a size that matters."""
    values = rng.normal(0, 0.08 if len(shape) > 1 else 0.1, shape)
    if name.endswith("norm.weight"):
        values += 1
    bits = values.astype(np.float32).view(np.uint32)
    if name.endswith("correction_bias"):
        return "F32", bits.tobytes()
    return "BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def write_checkpoint(source, folder):
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    pattern = "".join(LETTER[kind] for kind in config.pop("layers_block_type"))
    del config["mtp_layers_block_type"]
    config |= {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "mtp_hybrid_override_pattern": "*E",
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    raw = (source / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    rng = np.random.default_rng(13)
    for name, shape in head_shapes(config).items():
        dtype, piece = drawn(rng, name, shape)
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(piece)],
        }
        data += piece
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def record(folder):
    model, old = Model(folder), json.loads((folder / "golden.json").read_text())
    ids, to_logits = old["ids"], model.t["lm_head.weight"].T
    hidden = model.hidden(ids)
    first = old["logits_first_position"]
    difference = np.abs((hidden @ to_logits)[first:] - np.array(old["logits"])).max()
    print(f"largest difference from the body's record: {difference:.1e}")
    assert difference < 1e-3
    behind = ids[1:] + [int((hidden[-1] @ to_logits).argmax())]
    logits = model.head(hidden, behind) @ to_logits
    chain = []  # what the head drafts, each from its own output before
    for _ in range(DRAFTS):
        m = model.head(hidden, behind)[-1]
        chain.append(m @ to_logits)
        hidden = np.concatenate([hidden, m[None]])
        behind.append(int(chain[-1].argmax()))
    old |= {
        "head_next_id": behind[len(ids) - 1],
        "head_logits": logits[-ROWS:].round(5).tolist(),
        "drafts": behind[len(ids) :],
        "draft_logits": np.array(chain).round(5).tolist(),
    }
    (folder / "golden.json").write_text(json.dumps(old))


def main(out):
    folder = pathlib.Path(out) / NAME
    write_checkpoint(pathlib.Path(out) / SOURCE, folder)
    record(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
