"""What the tests of the package share: devices, random tensors, comparison with a double result."""

import pytest
import torch

import replayssm

# The library has threads of its own.
torch.set_num_threads(1)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and replayssm.has_cuda else [])
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [(F32, F32), (BF16, F32), (BF16, BF16), (BF16, F16), (F16, F32), (F16, F16), (F32, BF16)]
NAN = float("nan")

devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("act,state", DTYPES, ids=lambda t: str(t).split(".")[-1])


class Random:
    def __init__(self, seed, device):
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape, dtype=F32, scale=1.0):
        x = torch.randn(*shape, generator=self.generator) * scale
        return x.to(dtype).to(self.device)

    def uniform(self, *shape, low=0.0, high=1.0, dtype=F32):
        x = torch.rand(*shape, generator=self.generator) * (high - low) + low
        return x.to(dtype).to(self.device)

    def integers(self, low, high, count):
        return torch.randint(low, high, (count,), generator=self.generator)

    def permutation(self, count):
        return torch.randperm(count, generator=self.generator)


def poisoned(*shape, dtype, device):
    return torch.full(shape, NAN, dtype=dtype, device=device)


def assert_close(name, actual, expected, magnitude, terms):
    """`actual` may differ by its type's rounding and by that of fp32 sums of so many terms."""
    info = torch.finfo(actual.dtype)
    actual = actual.detach().cpu().double()
    bound = info.eps / 2 * 1.001 * expected.abs() + terms * 2.0**-24 * magnitude
    bound = bound + info.tiny * info.eps
    error = (actual - expected).abs()
    bad = ~(error <= bound)
    assert (
        not bad.any()
    ), f"{name}: {int(bad.sum())} of {bad.numel()} off, worst {(error / bound).max():.3g} bounds"


def assert_same(name, actual, before):
    """Bit for bit."""
    as_bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    assert torch.equal(actual.view(as_bits), before.view(as_bits)), f"{name} was written"
