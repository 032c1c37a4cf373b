"""transformers with our decode step: same text and logits as its own, whatever the cache does."""

import copy
from pathlib import Path

import pytest
import torch

from harness import devices

transformers = pytest.importorskip("transformers")
ReplaySSM = pytest.importorskip("replayssm.transformers")

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = {
    "nemotron_h": "models/tiny-nemotron-h",
    "qwen3_5": "models/tiny-qwen3.5",
    "mamba2": "tests/golden/random/mamba2",
    "kimi_linear": "tests/golden/random/kimi_linear",
    "bamba": "tests/golden/random/bamba",
}


def load(name, device):
    folder = REPOSITORY / FOLDERS[name]
    if not folder.exists():
        pytest.skip(f"{folder} is not there")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()


def prompt(model, batch=2, length=9):
    generator = torch.Generator().manual_seed(3)
    size = model.config.get_text_config().vocab_size
    return torch.randint(1, size, (batch, length), generator=generator).to(model.device)


def logits(model, ids, steps, cache_of=lambda cache: cache):
    """Of greedy steps after the prompt."""
    rows, name = [], "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
        for step in range(steps):
            cache = getattr(out, name)
            if step == steps // 2:
                cache = cache_of(cache)
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, **{name: cache}, use_cache=True)
            rows.append(out.logits[:, -1])
    return torch.stack(rows)


def assert_near(actual, expected):
    scale = expected.abs().max()
    assert (actual - expected).abs().max() < 2e-4 * scale


@devices
@pytest.mark.parametrize("name", FOLDERS)
def test_logits_and_text(device, name):
    model = load(name, device)
    ids = prompt(model)
    want = logits(model, ids, 12)
    text = model.generate(ids, max_new_tokens=20, do_sample=False)
    ReplaySSM.patch(model, buffer_len=4)
    assert_near(logits(model, ids, 12), want)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), text)
    ReplaySSM.unpatch(model)
    assert torch.equal(logits(model, ids, 12), want)


@devices
@pytest.mark.parametrize("name", FOLDERS)
def test_who_else_uses_the_cache_finds_it_up_to_date(device, name):
    model = load(name, device)
    ids = prompt(model)
    want = logits(model, ids, 10)
    ReplaySSM.patch(model, buffer_len=16)
    for change in (
        lambda cache: copy.deepcopy(cache),
        lambda cache: (cache.reorder_cache(torch.arange(2)), cache)[1],
        lambda cache: ([layer.recurrent_states[0] for layer in recurrent(cache)], cache)[1],
    ):
        assert_near(logits(model, ids, 10, change), want)


def recurrent(cache):
    return [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]


@devices
def test_the_ring_is_used(device):
    """Between flushes the cache's own states stay as the prompt left them."""
    model = ReplaySSM.patch(load("nemotron_h", device), buffer_len=8)
    ids = prompt(model)
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
        layer = recurrent(out.past_key_values)[0]
        before = layer.recurrent_states[0].clone()
        cache = out.past_key_values
        for _ in range(3):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        assert torch.equal(dict.__getitem__(layer.recurrent_states, 0), before)
        assert not torch.equal(layer.recurrent_states[0], before)


@devices
def test_beam_search(device):
    model = load("nemotron_h", device)
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    want = model.generate(prompt(model), **options)
    ReplaySSM.patch(model, buffer_len=4)
    assert torch.equal(model.generate(prompt(model), **options), want)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="model: expected recurrent layers of .* got Linear"):
        ReplaySSM.patch(torch.nn.Linear(2, 2))
