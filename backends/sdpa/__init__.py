"""PyTorch's scaled-dot-product kernels behind attnsel's contract, their aten ops called directly.

Entering ``torch.nn.attention.sdpa_kernel`` costs more than a small attention call, and ``F.sdpa`` chooses for
itself; here the kernel is the caller's choice and ``guards`` does what F.sdpa's chooser protected.

``candidate``  what the candidates are (no torch)
``run``        four kernels of the contract: the explicit ops, and the fast path bound to one call signature
``varlen``     the fifth: PyTorch's flash op with lengths and windows
``plan``, ``masks``  what a kernel expresses itself, and the mask that says the rest
``guards``     what a direct call must not be given
``ops``        the aten ops per torch version
"""
