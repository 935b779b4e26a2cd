"""Makes bfloat16 right in Triton's interpreter, which keeps it as uint16 bit patterns (test only).

Out of the box a dot product multiplies the patterns as integers and casts truncate, without a word. Our kernels load
bfloat16, cast it, feed it to tl.dot and store it; all arithmetic is float32. So casts and dots are done by torch's
bfloat16, and any other arithmetic on bfloat16 raises instead of returning nonsense.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def decode(patterns):
    """uint16 bit patterns -> float32."""
    return torch.from_numpy(np.ascontiguousarray(patterns).view(np.int16)).view(torch.bfloat16).float().numpy()


def encode(numbers):
    """Numbers -> uint16 bit patterns, rounded to nearest even as the hardware does."""
    array = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    return array.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def is_bfloat16(handle):
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def as_float32(handle):
    return TensorHandle(decode(handle.data), tl.float32) if is_bfloat16(handle) else handle


def install():
    plain_cast, plain_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast(self, source, target):
        if target.scalar == tl.bfloat16 and not is_bfloat16(source):
            return TensorHandle(encode(source.data), tl.bfloat16)
        if is_bfloat16(source) and target.scalar == tl.bfloat16:
            return source
        return plain_cast(self, as_float32(source), target)

    def dot(self, a, b, accumulator, *options):
        return plain_dot(self, as_float32(a), as_float32(b), accumulator, *options)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot
    for name in ("binary_op", "unary_op"):
        setattr(InterpreterBuilder, name, refuse_bfloat16(getattr(InterpreterBuilder, name)))


def refuse_bfloat16(operation):
    def checked(self, *arguments):
        if any(map(is_bfloat16, arguments)):
            raise NotImplementedError("arithmetic on bfloat16 in a kernel: cast to float32 first")
        return operation(self, *arguments)

    return checked
