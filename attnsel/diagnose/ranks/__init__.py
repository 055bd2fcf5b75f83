"""Many ranks' files brought into one answer: ``attnsel report``.

=============  ==========================================================
module         is
=============  ==========================================================
``sources``    which files: of folders, patterns and links
``reading``    the lines of one file, plain or gz, none too long to hold
``records``    what a line says
``tables``     what is kept of all lines: bounded, whatever the files hold
``answer``     what follows from the tables
``words``      the answer as text and as Markdown
=============  ==========================================================
"""
