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


def values(x, *strides):
    """x with the strides of the dimensions named, all but the last where none are."""
    if x is None:
        return lib.Values()
    given = strides or x.stride()[:-1]
    return lib.Values(
        x.data_ptr(), (lib.c_int64 * 3)(*given, *([0] * (3 - len(given)))), _DTYPES[x.dtype]
    )


def integers(x):
    if x is None:
        return lib.Integers()
    return lib.Integers(x.data_ptr(), x.stride(0), x.element_size())


def pointer(x):
    return None if x is None else x.data_ptr()


def call(name, device, *structs):
    """Runs an op of the library on the current stream of `device`."""
    arguments = [None if s is None else byref(s) for s in structs]
    if device.type == "cpu":
        lib.call_cpu(name, *arguments)
        return
    if device.type != "cuda":
        raise ValueError(f"{name}: expected CPU or CUDA tensors, got device {device}")
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
