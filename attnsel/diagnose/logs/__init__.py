"""What a pasted log or error says of attention: the calls in it, their causes and what helps.

==============  =====================================================================================
module          is
==============  =====================================================================================
``reader``      a log as entries: the lines that say something, and those that belong together
``message``     what one message says, and how a row of ``data/`` declares it
``parsers``     what a row cannot say: the functions that rows name
``vocabulary``  what is recognised: the libraries with their messages
``calls``       which findings belong to one call, how often it is in the log, what its messages mean there
``answer``      the question and the machine rebuilt, select() asked, causes and fixes
``report``      the answer as a document
==============  =====================================================================================
"""
