"""cuDNN's fused attention, and questions to libcudnn about GPUs that are not here.

``candidate`` what the candidate is (no torch)
``call``      what a graph is made of: the planner makes it from ``AttentionParams``, the runtime from tensors
``graph``     from a call to a plain description of its forward and backward graph: no cuDNN, no torch
``words``     what the library says when it refuses, for people
``build``     from a description to a graph of the frontend
``ask/``      the real library's word on a description, in a child process, for a described GPU
``tensors``   from the contract's tensors to a call, and to the buffers behind a graph's names
``session``   the frontend, a handle per thread and device, the library's log
``plans``     execution plans: built once, kept, counted
``run``       the contract: prepare, forward, backward
"""
