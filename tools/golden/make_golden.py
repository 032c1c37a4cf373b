"""Reference logits from the Hugging Face implementations, in float32, for the bundled and for tiny random checkpoints.

    python3 make_golden.py OUT MODELS      # needs a GPU, torch and transformers 5.17; about a minute

The floor that some reference paths put on dt (time_step_min) is switched off: the checkpoints define none.
"""
import json, os, pathlib, sys, math, shutil
import torch, transformers
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
DEV = "cuda"
OUT = pathlib.Path(sys.argv[1]); OUT.mkdir(parents=True, exist_ok=True)
PROMPTS = ["def fibonacci(n):\n    ", "import numpy as np\n\nclass Matrix:\n    def __init__(self, rows, cols):\n", "# The quick brown fox jumps over the lazy dog\n", "for i in range(10):\n    if i % 2 == 0:\n        print(", "x = 1\n", "class Café:\n    \"\"\"naïve – Ünïcode 日本語 🙂\"\"\"\n    def __repr__(self):\n        return f'{self.name"]

def without_dt_floor(model):
    for m in model.modules():
        if hasattr(m, "time_step_min"):
            m.time_step_min = 0.0
    return model

def greedy(model, ids, n):
    ids = list(ids); margins = []
    for _ in range(n):
        with torch.no_grad():
            l = model(input_ids=torch.tensor([ids], device=DEV), use_cache=False).logits[0, -1].float()
        top = l.topk(2).values
        margins.append(round((top[0] - top[1]).item(), 5)); ids.append(int(l.argmax()))
    return ids[-n:], margins

def trained(path, name):
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(str(path / "tokenizer.json"))
    config = transformers.AutoConfig.from_pretrained(path)
    if hasattr(config, "time_step_min"):
        config.time_step_min = 0.0
    model = without_dt_floor(transformers.AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32, attn_implementation="eager").to(DEV).eval())
    res = {"model": name, "prompts": []}
    for p in PROMPTS:
        ids = tok.encode(p).ids
        with torch.no_grad():
            lg = model(input_ids=torch.tensor([ids], device=DEV), use_cache=False).logits[0].float()
        t = lg.topk(10, -1)
        g, m = greedy(model, ids, 64)
        res["prompts"].append({"text": p, "ids": ids, "logsumexp": [round(x, 5) for x in lg.logsumexp(-1).tolist()],
            "top_ids": t.indices.tolist(), "top_logits": [[round(x, 5) for x in r] for r in t.values.tolist()],
            "greedy_ids": g, "greedy_margins": m, "greedy_text": tok.decode(g)})
    text = (path.parent / "eval.txt").read_text()[:60000]
    ids = tok.encode(text).ids[:8192]
    nll = []
    with torch.no_grad():
        for s in range(0, len(ids), 2048):
            w = ids[s:s + 2048]
            lg = model(input_ids=torch.tensor([w], device=DEV), use_cache=False).logits[0, :-1].float()
            nll += torch.nn.functional.cross_entropy(lg, torch.tensor(w[1:], device=DEV), reduction="none").tolist()
    res["perplexity"] = {"text": "first 60,000 characters of eval.txt, tokens 0..8191 in windows of 2048, each window scored alone", "tokens": len(nll), "mean_nll": sum(nll) / len(nll)}
    (OUT / f"{name}.json").write_text(json.dumps(res)); print(name, "ok", res["perplexity"]["mean_nll"], repr(res["prompts"][0]["greedy_text"][:120]), flush=True)
    # chat template + tokenizer cases
    cases = ["", " ", "\n\n\n", "a  b   c\t\td", "don't I'LL we've", "123456 3.14 1e-9", "日本語テキスト", "🙂👩‍👩‍👧", "Ａ½ﬁ e\u0301", "<|im_start|>user\nhi<|im_end|>", "\u200b\ufeffx", "foo\r\nbar\r", "  leading", "trailing  ", "a" * 300, "\x00\x01", "def f(x):\n\treturn x**2  # ok\n"]
    (OUT / f"{name}.tokenizer.json").write_text(json.dumps([{"text": c, "ids": tok.encode(c).ids, "decoded": tok.decode(tok.encode(c).ids, skip_special_tokens=False)} for c in cases]))

def rnd(name, cls, cfg, n_ids=40, seed=0):
    torch.manual_seed(seed)
    model = cls(cfg).to(DEV).float().eval()  # the initialisation takes log(time_step_min): build first, then drop the floor
    floors = {key: getattr(cfg, key) for key in ("time_step_min", "mamba_dt_min") if hasattr(cfg, key)}
    for key in floors:
        setattr(cfg, key, 0.0)
    without_dt_floor(model)
    with torch.no_grad():
        for k, p in model.named_parameters():
            if p.dim() >= 2 and "conv1d" not in k: p.normal_(0, 0.08)
            elif k.endswith(("norm.weight", "layernorm.weight")): p.add_(torch.randn_like(p) * 0.1)
            elif k.endswith("dt_bias"): p.normal_(-2, 1)
            elif k.endswith(".D"): p.normal_(1, 0.3)
    for p in model.parameters():
        p.data = p.data.bfloat16().float()  # what the saved file holds
    d = OUT / "random" / name; d.mkdir(parents=True, exist_ok=True)
    ids = torch.randint(3, cfg.get_text_config().vocab_size, (n_ids,)).tolist()
    with torch.no_grad():
        lg = model(input_ids=torch.tensor([ids], device=DEV), use_cache=False).logits[0].float()
    g, m = greedy(model, ids, 24)
    model.to(torch.bfloat16)
    for key, value in floors.items():
        setattr(cfg, key, value)
    model.save_pretrained(d, safe_serialization=True)
    (d / "golden.json").write_text(json.dumps({"ids": ids, "logits": [[round(x, 5) for x in r] for r in lg[-12:].tolist()], "logits_first_position": n_ids - 12, "greedy_ids": g, "greedy_margins": m}))
    print(name, "ok", sum(f.stat().st_size for f in d.iterdir()), "std", lg.std().item(), flush=True)

def attempt(f, *a, **k):
    try: f(*a, **k)
    except Exception as e:
        import traceback; print("FAIL", a[:1], repr(e)[:300]); traceback.print_exc(limit=3)

models = pathlib.Path(sys.argv[2])
attempt(trained, models / "tiny-nemotron-h", "tiny-nemotron-h"); attempt(trained, models / "tiny-qwen3.5", "tiny-qwen3.5")
T = transformers
def nem(**k):
    base = dict(vocab_size=256, hidden_size=64, layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"], tie_word_embeddings=False, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96, ssm_state_size=32, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, conv_kernel=4, chunk_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=48, moe_shared_expert_intermediate_size=64, routed_scaling_factor=2.5, norm_topk_prob=True, n_group=1, topk_group=1, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    base.update(k); return T.NemotronHConfig(**base)
attempt(rnd, "nemotron_h_moe", T.NemotronHForCausalLM, nem())
attempt(rnd, "nemotron_h_latent_moe_headdim80", T.NemotronHForCausalLM, nem(moe_latent_size=32, mamba_head_dim=80, mamba_num_heads=3, n_groups=1, ssm_state_size=64, n_routed_experts=8, num_experts_per_tok=3), seed=1)
attempt(rnd, "mamba2", T.Mamba2ForCausalLM, T.Mamba2Config(vocab_size=256, hidden_size=64, num_heads=8, head_dim=16, state_size=32, n_groups=2, num_hidden_layers=3, expand=2, chunk_size=16, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=2), seed=2)
try:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
    attempt(rnd, "qwen3_5_text", Qwen3_5ForCausalLM, Qwen3_5TextConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_key_head_dim=32, linear_value_head_dim=48, linear_num_key_heads=2, linear_num_value_heads=6, max_position_embeddings=512, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}), seed=3)
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM
    attempt(rnd, "qwen3_5_moe_text", Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=32, shared_expert_intermediate_size=48, num_experts=8, num_experts_per_tok=3, max_position_embeddings=512, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}), seed=4)
except Exception as e: print("qwen3_5", repr(e))
attempt(rnd, "qwen3_next", T.Qwen3NextForCausalLM, T.Qwen3NextConfig(vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96, linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=32, shared_expert_intermediate_size=48, num_experts=8, num_experts_per_tok=3, max_position_embeddings=512, tie_word_embeddings=False), seed=5)
try:
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    base = KimiLinearConfig().to_dict()
    print({k: v for k, v in base.items() if k not in ("layer_types", "mlp_layer_types", "id2label", "label2id")})
    attempt(rnd, "kimi_linear", KimiLinearForCausalLM, KimiLinearConfig(vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=32, num_experts=8, num_experts_per_token=3, num_shared_experts=1, linear_num_heads=4, linear_head_dim=32, layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse", "sparse", "sparse"], model_max_length=512, pad_token_id=2, bos_token_id=0, eos_token_id=1), seed=6)
except Exception as e: print("kimi", repr(e))
attempt(rnd, "bamba", T.BambaForCausalLM, T.BambaConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=32, mamba_expand=2, mamba_chunk_size=16, max_position_embeddings=512), seed=7)
attempt(rnd, "falcon_h1", T.FalconH1ForCausalLM, T.FalconH1Config(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=32, mamba_expand=2, mamba_chunk_size=16, max_position_embeddings=512), seed=8)
attempt(rnd, "granitemoehybrid", T.GraniteMoeHybridForCausalLM, T.GraniteMoeHybridConfig(vocab_size=256, hidden_size=64, intermediate_size=96, shared_intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, layer_types=["mamba", "attention", "mamba"], num_local_experts=4, num_experts_per_tok=2, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=32, mamba_expand=2, mamba_chunk_size=16, embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.2, logits_scaling=2.0, position_embedding_type="nope", max_position_embeddings=512, tie_word_embeddings=False), seed=9)
