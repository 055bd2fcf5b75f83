"""What attention an unmodified program really runs: seen through hooks that torch supports, and told.

=====================  ==============================================================================
module                 is
=====================  ==============================================================================
``record``             what is kept: Site, Process
``session``            ``attnsel.watch()``: begins, ends, threads, what was seen
``hooks``              the TorchFunctionMode, patches of library functions, operators inside one call
``observe``            the interface for an observer, the recorder that it tells; places and counts
``sdpa``               the observer of F.scaled_dot_product_attention, and of compiled regions
``libraries``          the observer of libraries' functions and modules
``by_hand``            the observer of attention written out; ``by_hand_operators`` follows its operators,
                       ``by_hand_call`` is one such call
``judge``              the best kernel for a site, why it did not run, the fix; the report and the files
=====================  ==============================================================================

The folder is not named ``watch`` because ``attnsel.watch`` is the function.
"""
