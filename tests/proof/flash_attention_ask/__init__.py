"""The packages' own word on an attention call, for a GPU that need not be here.

Their code runs as it is released, in a child process (``worker``) on tensors without memory, with the device
described (``device``) and what would be compiled or launched left out (``package_cute`` for flash_attn.4,
``package_cpp`` for the others). Of FlashAttention 2 and 3 the file of checks in C++ is compiled (``native``)
against stand-ins for CUDA's headers (``stubs/``), kernels are recorded, and what their launch templates get
wrong is read (``launch``). ``calls`` makes the call by attnsel's own backend, ``client`` starts the process
and reads it out. Nothing is downloaded.
"""
