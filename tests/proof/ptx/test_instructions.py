"""Each instruction against plain Python, on ordinary and on odd values. Sections are those of the PTX ISA."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from ptx_programs import LOAD, STORE, execute

WORD = 0xFFFFFFFF
ODD_WORDS = [
    0,
    1,
    2,
    5,
    31,
    32,
    33,
    63,
    255,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    WORD,
    0x12345678,
    0xFFFF0000,
]
# Zeros, subnormals, ties of 16-bit roundings, the largest values, infinities, NaN.
ODD_FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    1e-45,
    -1e-40,
    2.0**-126,
    1 + 2**-11,
    1 + 3 * 2**-11,
    1 + 2**-8,
    1 + 3 * 2**-8,
]
ODD_FLOATS += [
    65504.0,
    65519.9,
    65520.0,
    3.0e38,
    2.0**-24,
    2.0**-25,
    1.5 * 2.0**-24,
    math.inf,
    -math.inf,
    math.nan,
]
ODD_FLOATS += [0.5, 1.5, 2.5, -2.5, 2147483647.0, -2147483648.0, 4294967296.0]


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def real(x: int) -> float:
    return struct.unpack("<f", struct.pack("<I", x & WORD))[0]


def bits(x: float) -> int:
    return int(np.array(x, np.float64).astype(np.float32).view(np.uint32))


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(a: int, position: int, length: int, is_signed: bool, msb: int = 31) -> int:
    """9.7.1.19, bit by bit."""
    position, length = position & 255, length & 255
    sign = (a >> min(position + length - 1, msb)) & 1 if is_signed and length else 0
    picked = ((a >> position + k) & 1 if k < length and position + k <= msb else sign for k in range(msb + 1))
    return sum(bit << k for k, bit in enumerate(picked))


def wide_field(length: int, is_signed: bool, a: int, b: int, c: int) -> int:
    """Of 64 bits, both halves at once: see HALVES."""
    found = field(a | b << 32, c, length, is_signed, 63)
    return found ^ found >> 32


HALVES = "mov.b64 {%r21, %r22}, %rd9; xor.b32 %r20, %r21, %r22;"


def insert(a: int, b: int, position: int, length: int) -> int:
    for k in range(length & 255):
        if (position & 255) + k < 32:
            b = b & ~(1 << position + k) | (a >> k & 1) << position + k
    return b


def permute(a: int, b: int, selector: int) -> int:
    both, result = a | b << 32, 0
    for k in range(4):
        nibble = selector >> 4 * k & 15
        byte = both >> 8 * (nibble & 7) & 255
        result |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * k
    return result


def run(body: str, words: np.ndarray) -> np.ndarray:
    got, faults = execute(LOAD + body + STORE, words, threads=128, blocks=len(words) // 128)
    assert not faults
    return got[:, 0]


def grid(values: list[int], rng: np.random.Generator) -> np.ndarray:
    """All pairs of odd values, a third one at random, and random words: uint32 [n, 4], n % 128 == 0."""
    pairs = [(a, b, int(rng.choice(values)), 0) for a in values for b in values]
    pairs += rng.integers(0, 1 << 32, (128, 4)).tolist()
    pairs += [(0, 0, 0, 0)] * (-len(pairs) % 128)
    return np.array(pairs, dtype=np.uint64).astype(np.uint32)


INTEGERS: list[tuple[str, Callable[[int, int, int], int]]] = [
    ("add.s32 %r20, %r10, %r11;", lambda a, b, c: a + b),
    ("sub.s32 %r20, %r10, %r11;", lambda a, b, c: a - b),
    ("mul.lo.s32 %r20, %r10, %r11;", lambda a, b, c: a * b),
    ("mul.hi.u32 %r20, %r10, %r11;", lambda a, b, c: a * b >> 32),
    ("mul.hi.s32 %r20, %r10, %r11;", lambda a, b, c: signed(a) * signed(b) >> 32),
    ("mad.lo.s32 %r20, %r10, %r11, %r12;", lambda a, b, c: a * b + c),
    ("mul.wide.s32 %rd9, %r10, %r11; shr.u64 %rd9, %rd9, 16; cvt.u32.u64 %r20, %rd9;",
     lambda a, b, c: (signed(a) * signed(b) & (1 << 64) - 1) >> 16),
    ("mad.wide.u32 %rd9, %r10, %r11, 7; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r20, %rd9;",
     lambda a, b, c: a * b + 7 >> 32),
    ("mov.b64 %rd9, {%r10, %r11}; mov.b64 %rd10, {%r11, %r12}; mul.hi.u64 %rd9, %rd9, %rd10; "
     "mov.b64 {%r20, %r21}, %rd9;",
     lambda a, b, c: (a | b << 32) * (b | c << 32) >> 64),
    ("div.s32 %r20, %r10, %r11;", lambda a, b, c: truncated(signed(a), signed(b)) if b else -1),
    ("div.u32 %r20, %r10, %r11;", lambda a, b, c: a // b if b else -1),
    ("or.b32 %r11, %r11, 1; rem.s32 %r20, %r10, %r11;",
     lambda a, b, c: signed(a) - truncated(signed(a), signed(b | 1)) * signed(b | 1)),
    ("min.s32 %r20, %r10, %r11;", lambda a, b, c: min(signed(a), signed(b))),
    ("max.u32 %r20, %r10, %r11;", lambda a, b, c: max(a, b)),
    ("min.relu.s32 %r20, %r10, %r11;", lambda a, b, c: max(0, min(signed(a), signed(b)))),
    ("abs.s32 %r20, %r10;", lambda a, b, c: abs(signed(a))),
    ("neg.s32 %r20, %r10;", lambda a, b, c: -a),
    ("not.b32 %r20, %r10;", lambda a, b, c: ~a),
    ("and.b32 %r20, %r10, %r11;", lambda a, b, c: a & b),
    ("or.b32 %r20, %r10, %r11;", lambda a, b, c: a | b),
    ("xor.b32 %r20, %r10, %r11;", lambda a, b, c: a ^ b),
    ("lop3.b32 %r20, %r10, %r11, %r12, 0xE8;", lambda a, b, c: a & b | a & c | b & c),
    ("shl.b32 %r20, %r10, %r11;", lambda a, b, c: a << b if b < 32 else 0),
    ("shr.u32 %r20, %r10, %r11;", lambda a, b, c: a >> b if b < 32 else 0),
    ("shr.s32 %r20, %r10, %r11;", lambda a, b, c: signed(a) >> min(b, 31)),
    ("cvt.u16.u32 %rs1, %r10; shl.b16 %rs2, %rs1, 3; cvt.u32.u16 %r20, %rs2;",
     lambda a, b, c: (a << 3) & 0xFFFF),
    ("cvt.u16.u32 %rs1, %r10; shr.s16 %rs2, %rs1, 3; cvt.s32.s16 %r20, %rs2;",
     lambda a, b, c: signed(a, 16) >> 3),
    ("shf.l.wrap.b32 %r20, %r10, %r11, %r12;", lambda a, b, c: (a | b << 32) << (c & 31) >> 32),
    ("shf.r.wrap.b32 %r20, %r10, %r11, %r12;", lambda a, b, c: (a | b << 32) >> (c & 31)),
    ("shf.r.clamp.b32 %r20, %r10, %r11, %r12;", lambda a, b, c: (a | b << 32) >> min(c, 32)),
    ("bfe.u32 %r20, %r10, %r11, %r12;", lambda a, b, c: field(a, b, c, False)),
    ("bfe.s32 %r20, %r10, %r11, %r12;", lambda a, b, c: field(a, b, c, True)),
    *(
        (f"mov.b64 %rd9, {{%r10, %r11}}; bfe.{kind} %rd9, %rd9, %r12, {length}; {HALVES}",
         partial(wide_field, length, kind == "s64"))
        for kind in ("u64", "s64") for length in (0, 1, 31, 32, 63, 64, 200)
    ),
    ("and.b32 %r21, %r12, 31; bfi.b32 %r20, %r10, %r11, %r21, 9;", lambda a, b, c: insert(a, b, c & 31, 9)),
    ("prmt.b32 %r20, %r10, %r11, %r12;", permute),
    ("cvt.u16.u32 %rs1, %r10; cvt.s16.s8 %rs2, %rs1; cvt.s32.s16 %r20, %rs2;", lambda a, b, c: signed(a, 8)),
    ("cvt.s64.s32 %rd9, %r10; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r20, %rd9;", lambda a, b, c: -(a >> 31)),
    ("cvt.u64.u32 %rd9, %r10; shr.u64 %rd9, %rd9, 16; cvt.u32.u64 %r20, %rd9;", lambda a, b, c: a >> 16),
    ("mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r20, {%rs2, %rs1};", lambda a, b, c: a >> 16 | a << 16),
    ("setp.lt.s32 %p1, %r10, %r11; selp.b32 %r20, %r12, 7, %p1;",
     lambda a, b, c: c if signed(a) < signed(b) else 7),
    ("setp.hi.u32 %p1, %r10, %r11; @!%p1 mov.b32 %r12, 9; mov.b32 %r20, %r12;",
     lambda a, b, c: c if a > b else 9),
    ("setp.ne.s32 %p3, %r12, 0; setp.ge.and.s32 %p1|%p2, %r10, %r11, %p3; selp.b32 %r20, 1, 0, %p1; "
     "@%p2 add.s32 %r20, %r20, 2;",
     lambda a, b, c: (1 if signed(a) >= signed(b) else 2) if c else 0),
    ("setp.eq.b32 %p1, %r10, 1; not.pred %p2, %p1; selp.b32 %r20, 3, 4, %p2;",
     lambda a, b, c: 4 if a == 1 else 3),
    ("cvt.rn.f32.s32 %r20, %r10;", lambda a, b, c: int(np.float32(np.int32(signed(a))).view(np.uint32))),
    ("cvt.rn.f32.u32 %r20, %r10;", lambda a, b, c: int(np.float32(np.uint32(a)).view(np.uint32))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "wanted"), INTEGERS, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_integers(body: str, wanted: Callable[[int, int, int], int]) -> None:
    words = grid(ODD_WORDS, np.random.default_rng(0))
    got = run(body, words)
    expected = [wanted(*row) & WORD for row in words[:, :3].tolist()]
    assert got.tolist() == expected


def rounded(x: Fraction) -> float:
    """The nearest float32, ties to even, by exact arithmetic."""
    if x == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(x))) - 1, -126)
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    units = round(x / unit)  # Python rounds ties to even
    return float(units * unit) if abs(units * unit) < 2**128 else math.copysign(math.inf, x)


def fused(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return rounded(exact) if exact else float(np.float64(a) * np.float64(b) + np.float64(c))


def greater(a: float, b: float) -> float:
    """9.7.3.12: the number of a number and a NaN, and +0 of two zeros."""
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return a if (a, math.copysign(1, a)) > (b, math.copysign(1, b)) else b


def lesser(a: float, b: float) -> float:
    return -greater(-a, -b)


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def to_integer(x: float, low: int, high: int) -> int:
    return 0 if math.isnan(x) else int(min(max(x, low), high))


def half(x: float) -> int:
    return 0x7FFF if math.isnan(x) else int(np.float32(x).astype(np.float16).view(np.uint16))


def brain(x: float) -> int:
    if math.isnan(x):
        return 0x7FFF
    if math.isinf(x):
        return bits(x) >> 16
    low = bits(x) & 0xFFFF0000  # towards zero
    up = low + 0x10000
    middle = low | 0x8000
    return (up if bits(x) > middle or (bits(x) == middle and low & 0x10000) else low) >> 16


with np.errstate(all="ignore"):
    FLOATS: list[tuple[str, Callable[[float, float, float], float]]] = [
        ("add.f32 %r20, %r10, %r11;", lambda a, b, c: float(np.float32(a) + np.float32(b))),
        ("sub.f32 %r20, %r10, %r11;", lambda a, b, c: float(np.float32(a) - np.float32(b))),
        ("mul.f32 %r20, %r10, %r11;", lambda a, b, c: float(np.float32(a) * np.float32(b))),
        ("fma.rn.f32 %r20, %r10, %r11, %r12;", fused),
        ("fma.rn.ftz.f32 %r20, %r10, %r11, %r12;",
         lambda a, b, c: flushed(fused(*map(flushed, (a, b, c))))),
        ("div.full.f32 %r20, %r10, %r11;", lambda a, b, c: float(np.float32(a) / np.float32(b))),
        ("max.f32 %r20, %r10, %r11;", lambda a, b, c: greater(a, b)),
        ("min.f32 %r20, %r10, %r11;", lambda a, b, c: lesser(a, b)),
        ("max.f32 %r20, %r10, %r11, %r12;", lambda a, b, c: greater(greater(a, b), c)),
        ("min.f32 %r20, %r10, %r11, %r12;", lambda a, b, c: lesser(lesser(a, b), c)),
        ("mov.b64 %rd9, {%r10, %r11}; mov.b64 %rd10, {%r11, %r12}; fma.rn.f32x2 %rd9, %rd9, %rd10, %rd10; "
         "mov.b64 {%r21, %r20}, %rd9;", lambda a, b, c: fused(b, c, c)),
        ("mov.b64 %rd9, {%r10, %r11}; mov.b64 %rd10, {%r11, %r12}; add.f32x2 %rd9, %rd9, %rd10; "
         "mov.b64 {%r20, %r21}, %rd9;", lambda a, b, c: float(np.float32(a) + np.float32(b))),
        ("cvt.u16.u32 %rs1, %r10; cvt.u16.u32 %rs2, %r11; fma.rn.f32.bf16 %r20, %rs1, %rs2, %r12;",
         lambda a, b, c: fused(real(bits(a) << 16), real(bits(b) << 16), c)),
        ("cvt.rn.f16.f32 %rs1, %r10; sub.rn.f32.f16 %r20, %rs1, %r11;",
         lambda a, b, c: float(np.float32(np.float16(np.float32(a))) - np.float32(b))),
        ("max.NaN.f32 %r20, %r10, %r11;", lambda a, b, c: math.nan if a != a or b != b else greater(a, b)),
        ("neg.f32 %r20, %r10;", lambda a, b, c: -a),
        ("abs.f32 %r20, %r10;", lambda a, b, c: abs(a)),
        ("cvt.rn.f16.f32 %rs1, %r10; cvt.f32.f16 %r20, %rs1;",
         lambda a, b, c: float(np.float32(a).astype(np.float16))),
        ("cvt.rn.bf16.f32 %rs1, %r10; cvt.f32.bf16 %r20, %rs1;", lambda a, b, c: real(brain(a) << 16)),
        ("cvt.sat.f32.f32 %r20, %r10;", lambda a, b, c: 0.0 if a != a else min(max(a, 0.0), 1.0) + 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "wanted"), FLOATS, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_floats(body: str, wanted: Callable[[float, float, float], float]) -> None:
    words = grid([bits(x) for x in ODD_FLOATS], np.random.default_rng(1))
    got = run(body, words)
    for row, value in zip(words[:, :3].tolist(), got.tolist(), strict=True):
        given = [real(x) for x in row]
        with np.errstate(all="ignore"):
            expected = bits(wanted(*given))
        same = value == expected or (math.isnan(real(value)) and math.isnan(real(expected)))
        assert same, (given, real(value), real(expected))


def test_fma_rounds_once() -> None:
    """A product and a sum that float64 alone would round twice, to the wrong neighbour."""
    # (1 + e)(1 - e) is 1 - e^2: just below a tie of float32, and float64 sees the tie.
    near = ((1 + 2.0**-23), (1 - 2.0**-23) * 2.0**-24)
    cases = [
        (near[0], sign * near[1], c) for sign in (1, -1) for c in (1.0, 1 + 2.0**-23, -1.0, -1 - 2.0**-23)
    ]
    twice = [float(np.float32(np.float64(a) * b + c)) for a, b, c in cases]
    assert [fused(*case) for case in cases] != twice
    words = np.array([[*map(bits, case), 0] for case in cases], np.uint32).repeat(16, axis=0)
    got = run("fma.rn.f32 %r20, %r10, %r11, %r12;", words)
    assert got.tolist() == [bits(fused(*map(real, row))) for row in words[:, :3].tolist()]


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("to", ["s32", "u32"])
def test_floats_to_integers(mode: str, to: str) -> None:
    low, high = (-(2**31), 2**31 - 1) if to == "s32" else (0, 2**32 - 1)
    how = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    words = grid([bits(x) for x in ODD_FLOATS], np.random.default_rng(3))
    got = run(f"cvt.{mode}.{to}.f32 %r20, %r10;", words)
    for word, value in zip(words[:, 0].tolist(), got.tolist(), strict=True):
        x = real(word)
        assert value == to_integer(how(x) if math.isfinite(x) else x, low, high) & WORD, x


@pytest.mark.parametrize(("kind", "narrow"), [("f16", half), ("bf16", brain)])
def test_pairs_of_narrow_floats(kind: str, narrow: Callable[[float], int]) -> None:
    """The first source is the upper half."""
    words = grid([bits(x) for x in ODD_FLOATS], np.random.default_rng(4))
    got = run(f"cvt.rn.{kind}x2.f32 %r20, %r10, %r11;", words)
    with np.errstate(all="ignore"):
        expected = [narrow(real(a)) << 16 | narrow(real(b)) for a, b in words[:, :2].tolist()]
    assert got.tolist() == expected


COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


@pytest.mark.parametrize("compare", COMPARISONS)
def test_comparisons_with_nan(compare: str) -> None:
    words = grid([bits(x) for x in ODD_FLOATS], np.random.default_rng(5))
    got = run(f"setp.{compare}.f32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;", words)
    ordered = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
    }
    for (a, b), value in zip(words[:, :2].tolist(), got.tolist(), strict=True):
        x, y = real(a), real(b)
        nan = math.isnan(x) or math.isnan(y)
        if compare in ("num", "nan"):
            assert value == (nan if compare == "nan" else not nan)
        else:
            assert value == (compare.endswith("u") if nan else ordered[compare[:2]](x, y)), (x, y)


@pytest.mark.parametrize(("op", "function"), [("ex2", np.exp2), ("lg2", np.log2), ("rcp", np.reciprocal)])
def test_approximations_are_those_of_numpy(op: str, function: Callable[[np.ndarray], np.ndarray]) -> None:
    words = grid([bits(x) for x in ODD_FLOATS], np.random.default_rng(6))
    got = run(f"{op}.approx.ftz.f32 %r20, %r10;", words).view(np.float32)
    with np.errstate(all="ignore"):
        x = words[:, 0].view(np.float32)
        x = np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)
        expected = function(x)
        expected = np.where(np.abs(expected) < 2.0**-126, np.float32(0), expected)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "origin"),
    [("bfly", lambda n: n ^ 5), ("idx", lambda n: 5), ("up", lambda n: n - 5), ("down", lambda n: n + 5)],
)
def test_shuffles(mode: str, origin: Callable[[int], int]) -> None:
    """9.7.9.6; a lane whose source is beyond the warp keeps its own value, and is told."""
    last = 0 if mode == "up" else 31
    body = f"shfl.sync.{mode}.b32 %r20|%p1, %r10, 5, {last}, -1; @!%p1 add.s32 %r20, %r20, 1000;\n"
    words = np.arange(256, dtype=np.uint32).reshape(64, 4)
    got, faults = execute(LOAD + body + STORE, words, 64)
    assert not faults
    for lane in range(32):
        wanted = origin(lane)
        inside = 0 <= wanted < 32
        assert got[32 + lane, 0] == (words[32 + wanted, 0] if inside else words[32 + lane, 0] + 1000)


def test_a_reduction_over_a_warp() -> None:
    values = np.random.default_rng(7).standard_normal((64, 4)).astype(np.float32)
    values[3, 0] = np.nan
    body = LOAD + "redux.sync.max.f32 %r20, %r10, -1;" + STORE
    got, _ = execute(body, values.view(np.uint32), 64)
    wanted = [float(np.nanmax(values[:32, 0]))] * 32 + [float(values[32:, 0].max())] * 32
    assert got[:, 0].copy().view(np.float32).tolist() == wanted


@pytest.mark.parametrize(
    ("op", "combine"),
    [
        ("max.s32", lambda words: max(map(signed, words)) & WORD),
        ("min.s32", lambda words: min(map(signed, words)) & WORD),
        ("max.u32", max),
        ("min.u32", min),
        ("add.u32", lambda words: sum(words) & WORD),
        ("and.b32", lambda words: functools.reduce(operator.and_, words)),
        ("or.b32", lambda words: functools.reduce(operator.or_, words)),
        ("xor.b32", lambda words: functools.reduce(operator.xor, words)),
    ],
)
def test_a_reduction_of_integers_over_a_warp(op: str, combine: Callable[[list[int]], int]) -> None:
    words = np.random.default_rng(8).integers(0, 2**32, (64, 4), dtype=np.uint32)
    got, _ = execute(LOAD + f"redux.sync.{op} %r20, %r10, -1;" + STORE, words, 64)
    wanted = [combine(words[first : first + 32, 0].tolist()) for first in (0, 32)]
    assert got[:, 0].tolist() == [each for each in wanted for _ in range(32)]


def test_a_ballot_has_a_bit_per_lane() -> None:
    body = "and.b32 %r21, %r1, 1; setp.eq.b32 %p1, %r21, 0; vote.sync.ballot.b32 %r20, %p1, -1;"
    got, _ = execute(body + STORE, np.zeros((32, 4)), 32)
    assert set(got[:, 0].tolist()) == {0x55555555}
