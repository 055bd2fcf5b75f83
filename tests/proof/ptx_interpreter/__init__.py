"""Execute the PTX that Triton emits for our kernels on a CPU, and see faults that a GPU does not report.

PTX text is parsed (``parse.py``), its basic blocks become numpy source (``translate.py``, with one file per
family of instructions under ``operations/``), and ``machine.py`` runs all threads of many blocks together.
``run.py`` executes a ``Launch`` on CPU tensors, ``cases.py`` has the calls that ``conformance.py
--execute`` holds against float64, ``blame.py`` finds the first instruction at which an edited kernel goes
wrong. Section numbers are those of the PTX ISA 8.7.

What is checked: reads and writes of global memory outside a tensor's elements, alignment, blocks that write
or read what another block writes; shared memory out of bounds, misaligned, read before it was written, raced
for by warps that nothing orders or by lanes of a warp between ``bar.warp.sync``; data of cp.async, wgmma and
tensor copies used before its wait, and what they read or write touched before it; instructions of a warp in
part of a warp; barriers, mbarriers and requests for registers that nobody completes, with what they lack;
tensor maps that were not cleared, copied or acquired, or that the hardware would not take.

Who orders whom: where all barriers are of the whole block, notes on each byte that a barrier clears
(``intervals.py``); where warps meet in parts, by mbarriers or through copies, vector clocks (``clocks.py``).

What is not modelled, here and nowhere else:

- matrix instructions multiply exactly and add in float32 in numpy's order: not the hardware's order and
  truncation of its accumulators;
- ``ex2.approx``, ``lg2.approx``, ``rcp.approx``, ``div.full`` and their kin are as exact as numpy's float32
  functions; a GPU's differ by an ulp or two;
- payloads of NaNs (a NaN is a NaN; conversions to 16 bits give PTX's canonical one);
- memory order between blocks, caches, and the order in which warps run within a barrier interval: one order
  is executed, and what another order could change is reported as a race;
- ptxas: what is executed is PTX, not the machine code made from it.

Approximate, with clocks:

- order is kept by warp: what one lane waited for, its warp has seen, and any wait, arrival or barrier of a
  warp counts as ``bar.warp.sync`` between its lanes;
- a ``try_wait`` or ``test_wait`` that failed is tried again when the phase has ended, not before; who comes
  when two have ended waits for the wrong one, as on a GPU;
- copies land as late as may be, the oldest of a block first, each as a whole: its bytes count all at once;
- all copies that complete on one mbarrier are one agent with one clock;
- the ordinary accesses between which a tensor copy writes need order, and a fence only after stores; what an
  mbarrier's own initialisation needs for the asynchronous proxy is not asked for, nor that an mbarrier nobody
  used is given up before its eight bytes are used again (Triton does neither);
- a parity is its lowest bit (Triton gives 1 as -1); a tensor map's layout is made up, its fields are not;
- a tensor map acquired by one thread is acquired for its block; the pool of registers is counted, and what a
  register holds after it was given up is not forgotten.

Tensor copies out of shared memory, multicast, gather and im2col, and clusters are refused by opcode.
"""
