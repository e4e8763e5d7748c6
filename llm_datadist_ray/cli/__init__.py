"""The command line: ``llm-datadist-ray run`` and ``doctor``. Thin; what it does is in the layers below.

Exit codes of every command: 0 all well; 1 a request, a check or a fact of ``doctor`` failed; 2 wrong usage or
configuration; 130 interrupted.
"""
