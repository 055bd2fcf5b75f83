"""Ways out: the smallest sets of changes that make a refused candidate eligible.

=============  ==========================================================
file           about
=============  ==========================================================
``change``     what a change is: how it is made, what it costs, how it is told
``proposals``  what the failing rules propose
``search``     which sets of proposals work, cheapest first
``software``   which releases fit together, the commands for them, and why
=============  ==========================================================

They are shown, never applied by themselves: a cast to fp16 is for the user to decide.
"""

from attnsel.selection.unlock.search import Unlock, find_unlocks

__all__ = ["Unlock", "find_unlocks"]
