"""Megatron without Inductor: to be imported before Megatron, by pytest and by the server that forks ranks.

Megatron decorates functions by ``torch.compile`` when it is imported. That imports Inductor, four seconds in each
process, for what no test calls.
"""

from typing import Any

import torch

_compile: Any = torch.compile
torch.compile = lambda function=None, **options: _compile(function, **options) if options else function  # type: ignore[assignment]
