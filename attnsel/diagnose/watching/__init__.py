"""What attention an unmodified program really runs: seen through hooks that torch supports, and told.

=============  ==================================================================================
module         is
=============  ==================================================================================
``record``     what is kept: Site, Process
``session``    ``attnsel.watch()``: begins, ends, threads, what was seen
``hooks``      the TorchFunctionMode, patches of library functions, operators inside one call
``observe``    the interface for an observer, and the recorder that it tells
``places``     where in the program a call stands
``sites``      calls counted by place, kernel and question, in bounded memory
``operators``  aten's attention operators, and which candidate of attnsel's is the same kernel
``sdpa``       the observer of F.scaled_dot_product_attention
``judge``      the best kernel for a site, why it did not run, the fix
``report``     a table, JSON and Markdown
``files``      one file of JSON lines for each process
=============  ==================================================================================

The folder is not named ``watch`` because ``attnsel.watch`` is the function.
"""
