"""cuDNN's fused attention, and questions to libcudnn about GPUs that are not here.

``candidate`` what the candidate is (no torch)
``graph``     what a graph is made of, and from that a plain description of it: no cuDNN, no torch
``build``     from a description to a graph of the frontend
``ask/``      the real library's word on a description, in a child process, for a described GPU
``plans``     execution plans: built once, kept, counted; the frontend, handles, the library's log
``run``       the contract: prepare, bind, forward, backward, and the buffers behind a graph's names
"""
