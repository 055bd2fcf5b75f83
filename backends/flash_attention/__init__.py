"""FlashAttention's own packages: 2 (flash-attn), 3 (its hopper/ build) and 4 (flash-attn-4).

========================  ======================================================================
``candidate``             what they are
``packages``              their functions, found when first needed, called by the names of arguments
``kernel``                the contract, the same for all three
``two``, ``three``,       how each of them is called
``four``
========================  ======================================================================

Their own code is asked, on a machine without a GPU, by ``tests/proof/flash_attention_ask``.
"""
