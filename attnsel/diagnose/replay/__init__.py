"""A call that fell back, was refused or came out wrong, kept in a small file and run again.

============  ==========================================================
module        is
============  ==========================================================
``build``     the tensors again, with the same strides and offsets
``plain``     attention by its definition in float64, in torch alone
``run``       the call again, beside ``plain``: ``attnsel replay``
``script``    the same as a program for an upstream issue
============  ==========================================================

What a file holds: ``attnsel/runtime/replay_file.py``. The way of a call leaves one (``ATTNSEL_REPLAY_DIR``):
``attnsel/runtime/leave_replay.py``.
"""
