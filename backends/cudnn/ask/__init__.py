"""The real library's word on an attention graph, for a GPU that need not be here.

libcudnn 9.8 and newer plans for a device that is only described. Planning may crash, and without a driver
it needs a stand-in for libcuda, so it happens in a child process (``worker``); ``client`` starts it, reads
it out, and remembers what it said (``store``). Nothing is downloaded.
"""
