"""What attention a whole model holds, layer by layer, and what of it runs where: ``attnsel explain --model``.

``source`` finds and reads a configuration, ``recorded`` asks transformers' own code what it hands to
attention, ``table`` knows it of families where transformers is not installed. What both say is in ``calls``;
``plan`` puts each call to the engine, and ``document`` writes the answer.
"""
