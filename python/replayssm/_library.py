"""The shared library behind the package, through ctypes: its structs, its functions, its contexts.

The structs are those of include/replayssm/*.h, field by field.
"""

import ctypes
import os
import threading
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_uint8, c_uint32
from ctypes import c_void_p
from pathlib import Path

_FOLDER = Path(__file__).parent / "lib"

MAMBA2, GATED_DELTA, KIMI_DELTA = 0, 1, 2
CONVENTIONAL, STATE_AND_OUTPUT, OUTPUT_ONLY = 0, 1, 2
PAGED_SINGLE, PAGED_WINDOW = 0, 1


class Values(Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64 * 3), ("dtype", c_uint8)]


class Integers(Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64), ("bytes", c_int32)]


class PagedStep(Structure):
    _fields_ = [
        ("family", c_uint8),
        ("rule", c_uint8),
        ("part", c_uint8),
        ("softplus", c_uint8),
        ("normalise", c_uint8),
        ("sequences", c_int64),
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("head_dim", c_int64),
        ("state_dim", c_int64),
        ("ring", c_int64),
        ("max_window", c_int64),
        ("null_slot", c_int64),
        ("scale", c_float),
        ("slot", Integers),
        ("query_start", Integers),
        ("write_pos", Integers),
        ("origin", Integers),
        ("is_flush", Integers),
        ("state", Values),
        ("v", Values),
        ("k", Values),
        ("q", Values),
        ("dt", Values),
        ("beta", Values),
        ("a", Values),
        ("dt_bias", Values),
        ("skip", Values),
        ("z", Values),
        ("out", Values),
        ("cache_v", Values),
        ("cache_k", Values),
        ("cache_g", Values),
    ]


class PagedCursors(Structure):
    _fields_ = [
        ("sequences", c_int64),
        ("slot", Integers),
        ("null_slot", c_int64),
        ("write_pos", c_void_p),
        ("origin", c_void_p),
        ("is_flush", c_void_p),
        ("write_pos_stride", c_int64),
        ("origin_stride", c_int64),
        ("is_flush_stride", c_int64),
        ("threshold", c_int32),
        ("max_window", c_int32),
        ("ring", c_int32),
    ]


class RingConfig(Structure):
    _fields_ = [("buffer_len", c_int32), ("max_window", c_int32), ("conv_kernel", c_int32)]


class Cursor(Structure):
    _fields_ = [
        ("ring_start", c_int64),
        ("ring_count", c_int32),
        ("ring_limit", c_int32),
        ("fold_count", c_int32),
    ]


class Shape(Structure):
    _fields_ = [
        ("family", c_uint8),
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("head_dim", c_int64),
        ("state_dim", c_int64),
    ]


class ReadCopy(Structure):
    _fields_ = [("data", c_void_p), ("scale", c_void_p), ("dtype", c_uint8)]


class State(Structure):
    _fields_ = [
        ("checkpoint", c_void_p),
        ("ring_v", c_void_p),
        ("ring_k", c_void_p),
        ("ring_b", c_void_p),
        ("ring_g", c_void_p),
        ("ring_gate", c_void_p),
        ("checkpoint_dtype", c_uint8),
        ("activation_dtype", c_uint8),
        ("read_copy", ReadCopy),
    ]


class Rounding(Structure):
    _fields_ = [("seed", c_void_p), ("stream", c_uint32)]


class ChannelGate(Structure):
    _fields_ = [("scale", c_void_p), ("bias", c_void_p), ("lower_bound", c_float)]


class Batch(Structure):
    _fields_ = [
        ("sequences", c_int64),
        ("query_start", c_void_p),
        ("slot", c_void_p),
        ("cursors", c_void_p),
        ("ring", RingConfig),
        ("parent", c_void_p),
        ("plan", c_void_p),
    ]


class StepParams(Structure):
    _fields_ = [
        ("shape", Shape),
        ("route", c_uint8),
        ("batch", Batch),
        ("state", State),
        ("v", c_void_p),
        ("k", c_void_p),
        ("q", c_void_p),
        ("v_stride", c_int64),
        ("k_stride", c_int64),
        ("q_stride", c_int64),
        ("b", c_void_p),
        ("g", c_void_p),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("channel_gate", ChannelGate),
        ("skip", c_void_p),
        ("z", c_void_p),
        ("z_stride", c_int64),
        ("rounding", Rounding),
        ("o", c_void_p),
        ("o_dtype", c_uint8),
    ]


class FoldParams(Structure):
    _fields_ = [
        ("shape", Shape),
        ("batch", Batch),
        ("state", State),
        ("channel_gate", ChannelGate),
        ("rounding", Rounding),
        ("target_slot", c_void_p),
    ]


class Slots(Structure):
    _fields_ = [
        ("shape", Shape),
        ("batch", Batch),
        ("state", State),
        ("conv_inputs", c_void_p),
        ("channels", c_int64),
    ]


def _load():
    path = _FOLDER / "libreplayssm.so"
    if not path.exists():
        raise ImportError(f"{path}: expected the shared library, found none: install the package")
    return ctypes.CDLL(str(path))


_lib = _load()
_lib.replayssm_version.restype = ctypes.c_char_p
_lib.replayssm_last_error.restype = ctypes.c_char_p
_lib.replayssm_last_error.argtypes = [c_void_p]
_lib.replayssm_cpu_create.argtypes = [c_int32, POINTER(c_void_p)]
_lib.replayssm_ring_rows.restype = c_int64
_lib.replayssm_conv_rows.restype = c_int64

has_cuda = hasattr(_lib, "replayssm_cuda_recurrent_step")

# One context a thread serves its calls; threads of a context do not survive a fork.
_contexts = threading.local()


def _forget_contexts():
    global _contexts
    _contexts = threading.local()


os.register_at_fork(after_in_child=_forget_contexts)


def version():
    return _lib.replayssm_version().decode()


def _context(name, threads):
    context = getattr(_contexts, name, None)
    if context is None:
        context = c_void_p()
        if _lib.replayssm_cpu_create(threads, byref(context)) != 0:
            raise MemoryError("replayssm: a context could not be made")
        setattr(_contexts, name, context)
    return context


def _check(status, context, what):
    if status == 0:
        return
    text = (_lib.replayssm_last_error(context) or b"").decode()
    if status == 1 and "cudaError" not in text:
        raise ValueError(text)
    if status == 2:
        raise MemoryError(f"{what}: {text}")
    raise RuntimeError(f"{what}: {text}")


def call_cpu(name, *arguments):
    """Calls replayssm_<name>(context, arguments ...) with structs passed by reference."""
    context = _context("cpu", 0)
    _check(getattr(_lib, f"replayssm_{name}")(context, *arguments), context, name)


def call_cuda(name, stream, *arguments):
    """Calls replayssm_cuda_<name>(context, arguments ..., stream) on the current device."""
    if not has_cuda:
        raise RuntimeError(f"{name}: this replayssm was built without CUDA, got CUDA tensors")
    context = _context("cuda", 1)
    status = getattr(_lib, f"replayssm_cuda_{name}")(context, *arguments, c_void_p(stream))
    _check(status, context, name)


def function(name):
    """A function without context or status."""
    return getattr(_lib, f"replayssm_{name}")
