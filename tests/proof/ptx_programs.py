"""Small PTX kernels written by hand, executed: a body for every thread, 16 bytes in and 16 bytes out."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_interpreter.faults import Fault, Faults
from ptx_interpreter.global_memory import GlobalMemory
from ptx_interpreter.machine import Machine
from ptx_interpreter.parse import parse
from ptx_interpreter.translate import translate

HEAD = """.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(.param .u64 .ptr .global .align 1 p0, .param .u64 p1)
.reqntid {threads}{limit}
{{
 .reg .pred %p<16>; .reg .b16 %rs<32>; .reg .b32 %r<64>; .reg .b64 %rd<32>;
 ld.param.b64 %rd1, [p0]; ld.param.b64 %rd2, [p1];
 mov.u32 %r1, %tid.x; mov.u32 %r61, %ctaid.x; mov.u32 %r62, %ntid.x;
 mad.lo.s32 %r2, %r61, %r62, %r1;
 mul.wide.u32 %rd3, %r2, 16; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
"""
LOAD = "ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd4];\n"
STORE = "st.global.b32 [%rd5], %r20;\n"


def text_of(body: str, threads: int = 32, registers: int = 0) -> str:
    """``registers``: of a thread at its start, as .maxnreg says; 0: nothing is said."""
    limit = f" .maxnreg {registers}" if registers else ""
    return HEAD.format(threads=threads, limit=limit) + body + "\n ret;\n}\n"


def execute(
    body: str, words: Any, threads: int = 32, blocks: int = 1, shared: int = 4096, registers: int = 0
) -> tuple[Any, list[Fault]]:
    """What each thread left of its 16 bytes at %rd5, uint32 [n, 4], and the faults.

    ``words``: uint32 [n, 4], 16 bytes at %rd4 for each thread, and more where more are given. %r1 is the
    thread, %r2 its number in the grid.
    """
    program = translate(parse(text_of(body, threads, registers)))
    memory = GlobalMemory()
    data = np.ascontiguousarray(words, dtype=np.uint32).view(np.uint8).reshape(-1)
    parameters = [
        memory.add(name, each, np.ones_like(each)) for name, each in (("in", data), ("out", 0 * data))
    ]
    memory.freeze()
    faults = Faults(program.kernel)
    with np.errstate(all="ignore"):
        Machine(program, memory, parameters, shared, range(blocks), blocks, faults).run()
    return memory.contents(2).view(np.uint32).reshape(-1, 4), list(faults)
