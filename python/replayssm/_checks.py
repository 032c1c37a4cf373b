"""Checks of arguments: every failure names the tensor, what was expected and what came."""

import functools

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)
FLAGS = (torch.int8, torch.bool, torch.int32, torch.int64)


_MOST_REMEMBERED = 1000


def remembered(check):
    """A check of shapes, strides, types and devices, made once for each set of them."""
    passed = set()

    def layout(x):
        return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x

    @functools.wraps(check)
    def checked(*arguments):
        if torch.compiler.is_compiling():
            return check(*arguments)
        key = tuple(map(layout, arguments))
        if key in passed:
            return
        check(*arguments)
        if len(passed) >= _MOST_REMEMBERED:
            passed.clear()
        passed.add(key)

    return checked


def fail(name, expected, actual):
    raise ValueError(f"{name}: expected {expected}, got {actual}")


def present(name, x):
    if x is None:
        fail(name, "a tensor", "None")
    return x


def shape(name, x, expected):
    if tuple(x.shape) != tuple(expected):
        fail(name, f"shape {tuple(expected)}", tuple(x.shape))


def rank(name, x, *allowed):
    if x.dim() not in allowed:
        fail(name, f"{' or '.join(map(str, allowed))} dimensions", f"shape {tuple(x.shape)}")


def at_least(name, x, rows):
    if x.dim() != 1 or x.shape[0] < rows:
        fail(name, f"shape (n,) with n >= {rows}", tuple(x.shape))


def dtype(name, x, *allowed):
    if x.dtype not in allowed:
        fail(name, f"dtype {' or '.join(str(t) for t in allowed)}", x.dtype)


def floats(**tensors):
    for name, x in tensors.items():
        if x is not None:
            dtype(name, x, *FLOATS)


def same_dtype(reference, expected, **tensors):
    for name, x in tensors.items():
        if x.dtype != expected:
            fail(name, f"dtype {expected} as {reference}", x.dtype)


def unit_stride(**tensors):
    """Their last dimension must be contiguous."""
    for name, x in tensors.items():
        if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            fail(name, "stride 1 in the last dimension", f"strides {tuple(x.stride())}")


def contiguous(name, x):
    if not x.is_contiguous():
        fail(
            name, "a contiguous tensor", f"shape {tuple(x.shape)} with strides {tuple(x.stride())}"
        )


def tied(name, x, dimensions):
    """One value per head, expanded over the last dimensions."""
    if any(x.stride(-1 - i) != 0 and x.shape[-1 - i] > 1 for i in range(dimensions)):
        fail(
            name,
            f"stride 0 in the last {dimensions} dimension(s): one value per head, expanded",
            f"strides {tuple(x.stride())}",
        )


def divides(name, x, of_name, of):
    if x < 1 or of % x != 0:
        fail(name, f"a divisor of {of_name} {of}", x)


def same_device(device, **tensors):
    for name, x in tensors.items():
        if x is not None and x.device != device:
            fail(name, f"device {device}", x.device)


def slots(name, indices, null_slot=-1, **by_slot):
    """Slots that lie on the host are within the tensors that they index; a device's are not read."""
    if indices.device.type != "cpu" or indices.numel() == 0:
        return
    highest = max((i for i in indices.tolist() if i != null_slot), default=-1)
    for tensor, x in by_slot.items():
        if x is not None and highest >= x.shape[0]:
            fail(name, f"slots below the {x.shape[0]} of {tensor}", highest)


def windows(name, starts, tokens, longest):
    """The same for the first tokens of windows."""
    if starts.device.type != "cpu" or starts.numel() == 0:
        return
    starts = starts.tolist()
    if starts[0] < 0 or starts[-1] > tokens:
        fail(name, f"tokens from 0 to {tokens}", f"{starts[0]} to {starts[-1]}")
    for i, (begin, end) in enumerate(zip(starts, starts[1:])):
        if not 0 <= end - begin <= longest:
            fail(f"{name}[{i + 1}]", f"{begin} to {begin + longest}", end)


def power_of_two(name, x):
    if x < 1 or x & (x - 1) != 0:
        fail(name, "a power of two", x)


def window(name, window, threshold, ring):
    """A full window must fit behind another one that was accepted."""
    if not 1 <= window <= 32 or 2 * window > ring:
        fail(name, f"1 .. {min(32, ring // 2)} for caches of {ring} rows", window)
    if threshold > ring:
        fail("max_cache_len", f"at most the {ring} rows of the caches", threshold)
