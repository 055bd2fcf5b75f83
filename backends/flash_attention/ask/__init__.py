"""The packages' own word on an attention call, for a GPU that need not be here.

Their code runs as it is released, in a child process (``worker``) on tensors without memory, with the device
described (``device``) and what would be compiled or launched left out (``package_cute`` for flash_attn.4,
``package_cpp`` for the others). ``calls`` makes the call by attnsel's own backend, ``client`` starts the
process and reads it out. Nothing is downloaded.
"""
