"""PyTorch tensors as arguments of the library, and calls on their device."""

from ctypes import byref

import torch

from . import _library as lib

_DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.int8: 4,
}


def dtype_code(dtype):
    return _DTYPES[dtype]


def values(x, *strides, first=0):
    """data, strides and dtype of x: of the dimensions named, all but the last where none are.

    first: the element that is the first.
    """
    if x is None:
        return 0, 0, 0, 0, 0
    strides = strides or x.stride()[:-1]
    data = x.data_ptr() + first * x.element_size()
    return data, *strides, *(0,) * (3 - len(strides)), _DTYPES[x.dtype]


def integers(x):
    """data, stride and bytes of x."""
    return (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.element_size())


def pointer(x):
    return None if x is None else x.data_ptr()


def call(name, device, *structs):
    """Runs an op of the library on the current stream of `device`. Structs may be bytes."""
    arguments = [s if s is None or isinstance(s, bytes) else byref(s) for s in structs]
    if device.type == "cpu":
        lib.call_cpu(name, *arguments)
        return
    if device.type != "cuda":
        raise ValueError(f"{name}: expected CPU or CUDA tensors, got device {device}")
    if device.index == torch.cuda.current_device():
        lib.call_cuda(name, torch.cuda.current_stream(device).cuda_stream, *arguments)
        return
    with torch.cuda.device(device):
        lib.call_cuda(name, torch.cuda.current_stream(device).cuda_stream, *arguments)


def define(schema, implementation):
    """Registers an op that writes its results in place: replayssm::<schema>."""
    name = schema[: schema.index("(")]
    _ops.define(schema)
    for key in ("CPU", "CUDA"):
        _ops.impl(name, implementation, key)
    torch.library.register_fake(f"replayssm::{name}", lambda *arguments: None, lib=_ops)
    return getattr(torch.ops.replayssm, name).default


_ops = torch.library.Library("replayssm", "DEF")
