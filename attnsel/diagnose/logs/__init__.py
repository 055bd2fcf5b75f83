"""What a pasted log or error says of attention: the calls in it, their causes and what helps.

============  =======================================================================================
module        is
============  =======================================================================================
``reader``    a file or standard input as entries: lines without what launchers and loggers add
``message``   what one message says and how it is declared; secrets, which leave a log in no form
``parsers/``  what is recognised: a ``Message`` for each text of a library
``calls``     which findings belong to one call, and how often that call is in the log
``answer``    the question and the machine rebuilt, select() asked, causes and fixes
``report``    the answer as a document
============  =======================================================================================
"""
