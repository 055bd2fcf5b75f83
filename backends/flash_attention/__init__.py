"""FlashAttention's own packages: 2 (flash-attn), 3 (its hopper/ build) and 4 (flash-attn-4).

========================  ======================================================================
``candidate``             what they are
``kernel``                the contract, the same for all three, and how their functions are found and called
``two``, ``three``,       how each of them is called
``four``
========================  ======================================================================

Their own code is asked, on a machine without a GPU, by ``tests/proof/flash_attention_ask``.
"""
