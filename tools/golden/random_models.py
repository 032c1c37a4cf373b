"""The tiny random checkpoints of tests/golden/random: name -> (family, model, configuration, seed).

Small enough to keep in the repository, and odd where a loader or a kernel could rely on round
numbers: value and key widths that differ, one group or several, three heads, 80 columns.
"""

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

NEMOTRON_H = COMMON | {
    "layers_block_type": [
        "linear_attention",
        "moe",
        "full_attention",
        "mlp",
        "linear_attention",
        "moe",
    ],
    "tie_word_embeddings": False,
    "head_dim": 16,
    "intermediate_size": 96,
    "ssm_state_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

NEMOTRON_H_LATENT = NEMOTRON_H | {
    "moe_latent_size": 32,
    "mamba_head_dim": 80,
    "mamba_num_heads": 3,
    "n_groups": 1,
    "ssm_state_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}

MAMBA2 = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 32,
    "n_groups": 2,
    "num_hidden_layers": 3,
    "expand": 2,
    "chunk_size": 16,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

GATED_DELTA = COMMON | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": False,
}

GATED_DELTA_EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}

ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    }
}

QWEN3_5 = (
    GATED_DELTA
    | ROPE
    | {"intermediate_size": 96, "linear_value_head_dim": 48, "linear_num_value_heads": 6}
)
QWEN3_5_MOE = GATED_DELTA | ROPE | GATED_DELTA_EXPERTS
QWEN3_NEXT = GATED_DELTA | GATED_DELTA_EXPERTS | {"intermediate_size": 96}

KIMI_LINEAR = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "model_max_length": 512,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

MAMBA2_HYBRID = COMMON | {
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

BAMBA = MAMBA2_HYBRID | {"attn_layer_indices": [1]}
FALCON_H1 = MAMBA2_HYBRID | {"num_hidden_layers": 2, "head_dim": 16, "mamba_d_ssm": 128}
GRANITE = MAMBA2_HYBRID | {
    "shared_intermediate_size": 48,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
    "position_embedding_type": "nope",
    "tie_word_embeddings": False,
}

KIMI_GROUPS = KIMI_LINEAR | {
    "v_head_dim": 24,
    "linear_num_heads": 3,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "moe_renormalize": False,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
FALCON_H1_SCALED = FALCON_H1 | {
    "mamba_n_groups": 2,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": True,
    "mamba_proj_bias": True,
    "projectors_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "embedding_multiplier": 5.7,
    "lm_head_multiplier": 0.3,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.35, 0.8, 1.6, 0.5, 1.2],
    "mlp_multipliers": [0.9, 1.4],
}
GRANITE_DENSE_ROPE = GRANITE | {
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "mamba_proj_bias": True,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": [0.05, 0.2],
}

# Checkpoints whose projection biases and router corrections are random; those of the others are 0.
WITH_BIASES = {"kimi_linear_groups", "falcon_h1_scaled", "granitemoehybrid_dense_rope"}

RANDOM_MODELS = {
    "nemotron_h_moe": ("nemotron_h", "NemotronHForCausalLM", "NemotronHConfig", NEMOTRON_H, 0),
    "nemotron_h_latent_moe_headdim80": (
        "nemotron_h",
        "NemotronHForCausalLM",
        "NemotronHConfig",
        NEMOTRON_H_LATENT,
        1,
    ),
    "mamba2": ("mamba2", "Mamba2ForCausalLM", "Mamba2Config", MAMBA2, 2),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", QWEN3_5, 3),
    "qwen3_5_moe_text": (
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        QWEN3_5_MOE,
        4,
    ),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig", QWEN3_NEXT, 5),
    "kimi_linear": ("kimi_linear", "KimiLinearForCausalLM", "KimiLinearConfig", KIMI_LINEAR, 6),
    "bamba": ("bamba", "BambaForCausalLM", "BambaConfig", BAMBA, 7),
    "falcon_h1": ("falcon_h1", "FalconH1ForCausalLM", "FalconH1Config", FALCON_H1, 8),
    "granitemoehybrid": (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        GRANITE,
        9,
    ),
    "kimi_linear_groups": (
        "kimi_linear",
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        KIMI_GROUPS,
        10,
    ),
    "falcon_h1_scaled": (
        "falcon_h1",
        "FalconH1ForCausalLM",
        "FalconH1Config",
        FALCON_H1_SCALED,
        11,
    ),
    "granitemoehybrid_dense_rope": (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        GRANITE_DENSE_ROPE,
        12,
    ),
}
