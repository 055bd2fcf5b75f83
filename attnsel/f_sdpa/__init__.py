"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``, and the shim that puts it there.

``function``  the function, with PyTorch's signature: what its mask and leading dimensions become, and which
              calls go to PyTorch's own
``shim``      F.scaled_dot_product_attention is attnsel's in this process
"""
