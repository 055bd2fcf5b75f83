"""What a pasted log or error says of attention: the calls in it, their causes and what helps.

==============  ================================================================================
module          is
==============  ================================================================================
``reader``      a file or standard input as entries: lines without what launchers and loggers add
``parsers/``    what is recognised: a module per library, a ``Message`` for each text of its own
``found``       the values: what one message says, what one call comes to
``calls``       which findings belong to one call, and how often that call is in the log
``scrub``       secrets, paths, hosts and addresses, which leave a log in no form
``answer``      the question and the machine rebuilt, select() asked, causes and fixes
``report``      the answer as text and as Markdown
==============  ================================================================================
"""
