"""Reference records of the Hugging Face implementations, in float32 on a GPU.

    python3 tools/golden/make_golden.py tests/golden models [NAME...]

Needs torch and transformers 5.17; about a minute. Writes the logits of the bundled models and of
the tiny random checkpoints (and those checkpoints themselves), or of the named ones. The floor that some reference paths
put on dt (time_step_min) is switched off: the checkpoints define none.
"""

import importlib
import json
import pathlib
import sys
import traceback

import torch
import transformers
from random_models import RANDOM_MODELS, WITH_BIASES
from tokenizers import Tokenizer

DEVICE = "cuda"
PROMPTS = [
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self, rows, cols):\n",
    "# The quick brown fox jumps over the lazy dog\n",
    "for i in range(10):\n    if i % 2 == 0:\n        print(",
    "x = 1\n",
    'class Café:\n    """naïve – Ünïcode 日本語 🙂"""\n'
    "    def __repr__(self):\n        return f'{self.name",
]
TOKENIZER_CASES = [
    "",
    " ",
    "\n\n\n",
    "a  b   c\t\td",
    "don't I'LL we've",
    "123456 3.14 1e-9",
    "日本語テキスト",
    "🙂👩\u200d👩\u200d👧",
    "Ａ½ﬁ e\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "\u200b\ufeffx",
    "foo\r\nbar\r",
    "  leading",
    "trailing  ",
    "a" * 300,
    "\x00\x01",
    "def f(x):\n\treturn x**2  # ok\n",
]


def drop_dt_floor(model):
    for module in model.modules():
        if hasattr(module, "time_step_min"):
            module.time_step_min = 0.0


def logits_of(model, ids):
    with torch.no_grad():
        tokens = torch.tensor([ids], device=DEVICE)
        return model(input_ids=tokens, use_cache=False).logits[0].float()


def rounded(rows):
    return [[round(x, 5) for x in row] for row in rows.tolist()]


def greedy(model, ids, steps):
    """The greedy continuation, and at each step the margin between the two largest logits."""
    ids, margins = list(ids), []
    for _ in range(steps):
        last = logits_of(model, ids)[-1]
        top = last.topk(2).values
        margins.append(round((top[0] - top[1]).item(), 5))
        ids.append(int(last.argmax()))
    return ids[-steps:], margins


def prompt_record(model, tokenizer, prompt):
    ids = tokenizer.encode(prompt).ids
    logits = logits_of(model, ids)
    top = logits.topk(10, -1)
    greedy_ids, margins = greedy(model, ids, 64)
    return {
        "text": prompt,
        "ids": ids,
        "logsumexp": [round(x, 5) for x in logits.logsumexp(-1).tolist()],
        "top_ids": top.indices.tolist(),
        "top_logits": rounded(top.values),
        "greedy_ids": greedy_ids,
        "greedy_margins": margins,
        "greedy_text": tokenizer.decode(greedy_ids),
    }


def perplexity_record(model, tokenizer, text):
    ids = tokenizer.encode(text[:60000]).ids[:8192]
    nll = []
    for start in range(0, len(ids), 2048):
        window = ids[start : start + 2048]
        targets = torch.tensor(window[1:], device=DEVICE)
        logits = logits_of(model, window)[:-1]
        nll += torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
    return {
        "text": "first 60,000 characters of eval.txt, tokens 0..8191 in windows of 2048, "
        "each window scored alone",
        "tokens": len(nll),
        "mean_nll": sum(nll) / len(nll),
    }


def tokenizer_record(tokenizer, text):
    ids = tokenizer.encode(text).ids
    return {
        "text": text,
        "ids": ids,
        "decoded": tokenizer.decode(ids, skip_special_tokens=False),
    }


def bundled(out, folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "time_step_min"):
        config.time_step_min = 0.0
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.to(DEVICE).eval()
    drop_dt_floor(model)
    text = (folder.parent / "eval.txt").read_text()
    record = {
        "model": folder.name,
        "prompts": [prompt_record(model, tokenizer, prompt) for prompt in PROMPTS],
        "perplexity": perplexity_record(model, tokenizer, text),
    }
    (out / f"{folder.name}.json").write_text(json.dumps(record))
    cases = [tokenizer_record(tokenizer, case) for case in TOKENIZER_CASES]
    (out / f"{folder.name}.tokenizer.json").write_text(json.dumps(cases))
    print(folder.name, "mean NLL", record["perplexity"]["mean_nll"], flush=True)


def randomize(model):
    """Weights of a size that makes every part of the model matter, rounded to what a file holds."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "conv1d" not in name:
                weight.normal_(0, 0.08)
            elif name.endswith(("norm.weight", "layernorm.weight")):
                weight.add_(torch.randn_like(weight) * 0.1)
            elif name.endswith("dt_bias"):
                weight.normal_(-2, 1)
            elif name.endswith(".D"):
                weight.normal_(1, 0.3)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()


def randomize_biases(model):
    with torch.no_grad():
        for name, bias in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("_proj.bias", "e_score_correction_bias")):
                bias.normal_(0, 0.1)
                bias.data = bias.data.bfloat16().float()


def random_checkpoint(out, name, prompt_length=40):
    family, model_class, config_class, options, seed = RANDOM_MODELS[name]
    package = f"transformers.models.{family}"
    configuration = importlib.import_module(f"{package}.configuration_{family}")
    modeling = importlib.import_module(f"{package}.modeling_{family}")
    config = getattr(configuration, config_class)(**options)

    torch.manual_seed(seed)
    model = getattr(modeling, model_class)(config).to(DEVICE).float().eval()
    # The initialisation takes log(time_step_min): the floor goes only now, and is back when saving.
    floors = {
        key: getattr(config, key)
        for key in ("time_step_min", "mamba_dt_min")
        if hasattr(config, key)
    }
    for key in floors:
        setattr(config, key, 0.0)
    drop_dt_floor(model)
    randomize(model)
    if name in WITH_BIASES:
        randomize_biases(model)

    ids = torch.randint(3, config.get_text_config().vocab_size, (prompt_length,)).tolist()
    logits = logits_of(model, ids)
    greedy_ids, margins = greedy(model, ids, 24)
    record = {
        "ids": ids,
        "logits": rounded(logits[-12:]),
        "logits_first_position": prompt_length - 12,
        "greedy_ids": greedy_ids,
        "greedy_margins": margins,
    }

    folder = out / "random" / name
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    for key, value in floors.items():
        setattr(config, key, value)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "golden.json").write_text(json.dumps(record))
    print(name, "standard deviation of the logits", logits.std().item(), flush=True)


def main(out, models, *names):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    out, models = pathlib.Path(out), pathlib.Path(models)
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(bundled, models / name) for name in ("tiny-nemotron-h", "tiny-qwen3.5")]
    jobs += [(random_checkpoint, name) for name in RANDOM_MODELS]
    jobs = [(make, what) for make, what in jobs if not names or pathlib.Path(what).name in names]
    failed = []
    for make, what in jobs:
        try:
            make(out, what)
        except Exception:  # the other records are still worth having
            traceback.print_exc(limit=3)
            failed.append(str(what))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
