"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``, and the shim that puts it there.

``function``  the function, with PyTorch's signature
``masks``     what its ``attn_mask`` becomes
``shapes``    leading dimensions as [b, h]
``theirs``    which calls go to PyTorch's own function, and why
``shim``      F.scaled_dot_product_attention is attnsel's in this process
"""
