"""What generated code computes with: bit-exact integers, conversions and rounding on arrays of lanes.

An array of uint16 may hold bfloat16, one of uint32 pairs of 16-bit floats: the functions say which.
"""

from __future__ import annotations

from typing import Any

import numpy as np

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64
Array = Any  # numpy's generic types say nothing about shapes and little about dtypes that change by view

_SMALLEST = f4(2.0**-126)  # normal float32
_HALFWAY, _BELOW = u8(1 << 28), u8((1 << 29) - 1)  # of the bits that float64 has beyond float32


def pack(*parts: Array) -> Array:
    """The first lowest."""
    return np.stack(parts, axis=-1).view(f"u{parts[0].itemsize * len(parts)}").reshape(-1)


# -- floating point ---------------------------------------------------------------------------------------
def ftz(x: Array) -> Array:
    """.ftz: subnormal float32 to zero of the same sign."""
    return np.where(np.abs(x) < _SMALLEST, np.copysign(f4(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """float32, rounded once. Products are exact in float64; a sum that the second rounding could turn is odd
    rounded first (Boldo and Melquiond, 2008).
    """
    product, wide = a.astype(f8) * b, c.astype(f8)
    total = product + wide
    risky = ((total.view(u8) & _BELOW) == _HALFWAY) | (np.abs(total) < _SMALLEST)
    if risky.any():
        back = total - product
        lost = (product - (total - back)) + (wide - back)  # exactly (Knuth's sum)
        bits = total.view(i8)
        odd = bits + np.where((lost > 0) == (total > 0), 1, -1)
        total = np.where(risky & (lost != 0) & np.isfinite(lost) & (bits & 1 == 0), odd, bits).view(f8)
    return total.astype(f4)


def fmax(a: Array, b: Array) -> Array:
    """The number where one is NaN (9.7.3.12); +0 above -0."""
    bits = f"u{a.itemsize}"
    return np.where(a == b, (a.view(bits) & b.view(bits)).view(a.dtype), np.fmax(a, b))


def fmin(a: Array, b: Array) -> Array:
    bits = f"u{a.itemsize}"
    return np.where(a == b, (a.view(bits) | b.view(bits)).view(a.dtype), np.fmin(a, b))


def nan_max(a: Array, b: Array) -> Array:
    """.NaN: NaN where one is."""
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), fmax(a, b))


def nan_min(a: Array, b: Array) -> Array:
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), fmin(a, b))


def saturate(x: Array) -> Array:
    """.sat: to [0, 1], NaN to +0."""
    return np.where(np.isnan(x) | (x <= 0), f4(0), np.minimum(x, f4(1)))


def from_bf16(x: Array) -> Array:
    return (x.astype(u4) << u4(16)).view(f4)


def to_f16(x: Array) -> Array:
    """Bits of the nearest float16, ties to even, above the largest infinity."""
    return np.where(np.isnan(x), u2(0x7FFF), x.astype(f2).view(u2))


def to_bf16(x: Array) -> Array:
    """Bits of the nearest bfloat16 of float32, ties to even."""
    bits = x.view(u4)
    rounded = ((bits + (u4(0x7FFF) + ((bits >> u4(16)) & u4(1)))) >> u4(16)).astype(u2)
    return np.where(np.isnan(x), u2(0x7FFF), rounded)


def to_tf32(x: Array) -> Array:
    """Bits of cvt.rna: 10 bits of mantissa, ties away from zero."""
    bits = x.view(u4)
    return np.where(np.isfinite(x), (bits + u4(0x1000)) & u4(0xFFFFE000), bits)


def to_integer(x: Array, to: Any) -> Array:
    """Of a rounded float: clamped to the range, NaN to 0 (9.7.9.22)."""
    low, high = np.iinfo(to).min, np.iinfo(to).max
    inside = np.where(np.isnan(x) | (x >= float(high)) | (x <= float(low)), 0, x).astype(to)
    return np.where(x >= float(high), to(high), np.where(x <= float(low), to(low), inside))


# -- integers ---------------------------------------------------------------------------------------------
def mul_hi(a: Array, b: Array) -> Array:
    if a.itemsize < 8:
        wide = i8 if a.dtype.kind == "i" else u8
        return ((a.astype(wide) * b.astype(wide)) >> wide(8 * a.itemsize)).astype(a.dtype)
    low, half = u8(0xFFFFFFFF), u8(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    return a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half)


def divide(a: Array, b: Array) -> Array:
    """Towards zero; by zero, which is undefined, all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    size = f"u{a.itemsize}"  # the most negative number has no magnitude of its own type
    quotient = (np.where(a < 0, -a, a).view(size) // np.where(safe < 0, -safe, safe).view(size)).view(a.dtype)
    signed = np.where((a < 0) != (safe < 0), -quotient, quotient)
    return np.where(b == 0, ~b.dtype.type(0), signed)


def remainder(a: Array, b: Array) -> Array:
    return a - divide(a, b) * b


def shl(a: Array, count: Array) -> Array:
    """Counts beyond the width are clamped (9.7.8.8)."""
    width = u4(8 * a.itemsize)
    return np.where(count < width, a << (count & (width - u4(1))).astype(a.dtype), a.dtype.type(0))


def shr(a: Array, count: Array) -> Array:
    width = u4(8 * a.itemsize)
    if a.dtype.kind == "i":
        return a >> np.minimum(count, width - u4(1)).astype(a.dtype)
    return np.where(count < width, a >> (count & (width - u4(1))).astype(a.dtype), a.dtype.type(0))


def funnel_left(low: Array, high: Array, count: Array) -> Array:
    both = (high.astype(u8) << u8(32)) | low
    return ((both << count.astype(u8)) >> u8(32)).astype(u4)


def funnel_right(low: Array, high: Array, count: Array) -> Array:
    both = (high.astype(u8) << u8(32)) | low
    return (both >> count.astype(u8)).astype(u4)


def bfe(a: Array, position: Array, length: Array) -> Array:
    """Bits [position, position + length), above the top the sign where ``a`` is signed (9.7.1.19)."""
    width = 8 * a.itemsize
    position, length = (position & u4(255)).astype(i8), (length & u4(255)).astype(i8)
    bits = a.view(f"u{a.itemsize}").astype(u8)
    there = np.minimum(length, width - position).clip(0)  # bits of the field that ``a`` has
    ones = np.where(there < 64, (u8(1) << np.minimum(there, 63).astype(u8)) - u8(1), ~u8(0))
    field = (bits >> np.minimum(position, 63).astype(u8)) & ones
    if a.dtype.kind == "i":
        top = np.minimum(position + length - 1, width - 1).clip(0).astype(u8)
        negative = ((bits >> top) & u8(1) == 1) & (length > 0)
        field = np.where(negative, field | ~ones, field)
    return field.astype(f"u{a.itemsize}").view(a.dtype)


def bfi(a: Array, b: Array, position: Array, length: Array) -> Array:
    """``length`` low bits of ``a`` at ``position`` of ``b``, 32 bits (9.7.1.20)."""
    position, length = (np.minimum(x & u4(255), u4(32)).astype(u8) for x in (position, length))
    mask = (((u8(1) << length) - u8(1)) << position) & u8(0xFFFFFFFF)
    return ((b & ~mask) | ((a.astype(u8) << position) & mask)).astype(u4)


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """9.7.8.6: bit k of ``table`` is the result where a, b, c have the bits of k."""
    result = np.zeros_like(a)
    for k in range(8):
        if table >> k & 1:
            result |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return result


def prmt(a: Array, b: Array, selector: Array) -> Array:
    """9.7.9.7: each nibble picks one of eight bytes; its top bit repeats that byte's sign."""
    both = (b.astype(u8) << u8(32)) | a
    result = np.zeros_like(a)
    for k in range(4):
        nibble = (selector >> u4(4 * k)) & u4(15)
        byte = (both >> ((nibble & u4(7)).astype(u8) << u8(3))) & u8(255)
        signs = np.where(byte & u8(128) != 0, u8(255), u8(0))
        result |= np.where(nibble & u4(8) != 0, signs, byte).astype(u4) << u4(8 * k)
    return result


def names() -> dict[str, Any]:
    """What generated source may name."""
    from_numpy = "where maximum minimum absolute isnan exp2 log2 reciprocal sqrt tanh rint trunc floor ceil"
    own = {name: value for name, value in globals().items() if not name.startswith("_")}
    return own | {name: getattr(np, name) for name in from_numpy.split()}
