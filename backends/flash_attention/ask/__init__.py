"""FlashAttention's own word on a call, for a GPU that need not be here.

Its Python is imported from the folder that a user names, in a child process. Of FlashAttention 2 and 3 the
file of checks in C++ is compiled (``native``) against stand-ins for CUDA's headers (``stubs/``); kernels are
recorded, never run. Nothing is downloaded.
"""
