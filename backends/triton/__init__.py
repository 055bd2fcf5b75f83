"""attnsel's own flash attention in Triton, forward and backward: every feature of the contract, GPU and CPU.

On CUDA tensors the kernels are compiled; on CPU tensors the same kernels go through Triton's interpreter,
which is slow and for tests and curiosity. Deterministic: no atomics anywhere. Memory is O(s_q + s_kv).

``candidate``  what the candidate is (no torch, no triton)
``run``        the contract's functions; importing it needs triton, and touches no driver
"""
