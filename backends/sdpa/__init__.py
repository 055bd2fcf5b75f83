"""PyTorch's scaled-dot-product kernels behind attnsel's contract, their aten ops called directly.

Entering ``torch.nn.attention.sdpa_kernel`` costs more than a small attention call, and ``F.sdpa`` chooses for
itself; here the kernel is the caller's choice and ``guards`` does what F.sdpa's chooser protected.

``candidate``  what the four candidates are (no torch)
``kernels``    the four kernels of the contract
``bound``      the fast path: the op bound to one call signature
``run``        forward and backward by the explicit ops
``plan``, ``masks``  what a kernel expresses itself, and the mask that says the rest
``guards``, ``conditions``  what a direct call must not be given
``ops``, ``shapes``  the aten ops per torch version, and the shapes they want
"""
