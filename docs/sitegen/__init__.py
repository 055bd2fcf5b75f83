"""The documentation site: hand-written pages, and what is generated from rules, help texts and docstrings.

``python docs/make_site.py`` builds it. Every generator is a module with ``files() -> Iterator[File]``, listed
in ``sitegen.sources.GENERATORS``; nothing that it makes is committed.
"""
