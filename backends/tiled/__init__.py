"""Flash attention in plain PyTorch operations: every feature, every device, slow and never wrong.

Blocks over queries and keys, online softmax in float32 (float64 for float64 inputs), a backward that
recomputes the scores; memory is O(s_q + s_kv). The last resort, and the reference for the others.

Dense calls read no tensor on the host. Packed (thd) calls read the ``cu_seqlens`` once.

``candidate``  what the candidate is (no torch)
``kernel``     the contract's two functions
"""
