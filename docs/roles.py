"""Makes docstrings readable on the site: ``:class:`RobustWriter``` becomes plain code, and an example a block of code.

Owns nothing else. mkdocstrings calls it for each object that the API reference shows.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["Roles"]

_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?(?:robust_dcp\.)?([^`]+)`")


class Roles(Extension):
    """See the module."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value).replace("\nExample:\n", "\nExamples:\n")
