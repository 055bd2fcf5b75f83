"""Execute the PTX that Triton emits for our kernels on a CPU, and see faults that a GPU does not report.

PTX text is parsed (``parse.py``), its basic blocks become numpy source (``translate.py``, with one file per
family of instructions under ``operations/``), and ``machine.py`` runs all threads of many blocks together.
``run.py`` executes a ``Launch`` on CPU tensors, ``cases.py`` has the calls that ``attnsel conformance
--execute`` holds against float64, ``blame.py`` finds the first instruction at which an edited kernel goes
wrong. Section numbers are those of the PTX ISA 8.7.

What is checked: reads and writes of global memory outside a tensor's elements, alignment, blocks that write
or read what another block writes; shared memory out of bounds, misaligned, read before it was written, raced
for by warps within a barrier interval or by lanes of a warp between ``bar.warp.sync``; cp.async and wgmma
data used before its wait; instructions of a warp in part of a warp; barriers nobody completes.

What is not modelled, here and nowhere else:

- matrix instructions multiply exactly and add in float32 in numpy's order: not the hardware's order and
  truncation of its accumulators;
- ``ex2.approx``, ``lg2.approx``, ``rcp.approx``, ``div.full`` and their kin are as exact as numpy's float32
  functions; a GPU's differ by an ulp or two;
- payloads of NaNs (a NaN is a NaN; conversions to 16 bits give PTX's canonical one);
- memory order between blocks, caches, and the order in which warps run within a barrier interval: one order
  is executed, and what another order could change is reported as a race;
- ptxas: what is executed is PTX, not the machine code made from it.
"""
