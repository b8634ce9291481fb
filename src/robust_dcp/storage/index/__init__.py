"""``.robust_dcp.index``: the contents of ``.metadata`` in sorted columns, so that a load reads only what it asks for.

``plan.plan`` builds the index, and the commit writes it beside ``.metadata``. The reader looks up items in it, and
a job that resumes finds its plan there. The coordinator of a load checks all of it first. If it is damaged, or does not
fit its ``.metadata``, that is read instead.
"""
