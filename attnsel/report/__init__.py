"""An answer as a document, and what writes it: as text, as Markdown.

=================  ====================================================================
file               about
=================  ====================================================================
``document``       what a document is made of
``text``           the writer of text, for a terminal, a log and an error message alike
``markdown``       the writer of Markdown
``prose``          our own sentences taken apart, for a writer that shows names and links
``words``          the machine, the call and the policy in words
``answer``         the whole answer: its sentences, and the document made of them
``short``          the answer on one screen; another library's chooser beside it; the whole as JSON
``copy_advice``    what a copy of k and v costs, and what avoids it
=================  ====================================================================
"""
