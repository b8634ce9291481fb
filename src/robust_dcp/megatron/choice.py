"""Whether robust_dcp is the planner that was chosen, and can be one here.

Asked by every replacement in ``save_patches`` and ``load_patches`` before it does anything else than Megatron would.
"""

from __future__ import annotations

from robust_dcp.megatron.hooks.options import current_options
from robust_dcp.switch.stock_paths import say_stays_stock

__all__ = ["is_chosen"]


def is_chosen() -> bool:
    """Whether saves and loads of Megatron go through robust_dcp: it is the planner, and the files are on file systems
    that are mounted. With ``--enable-msc`` Megatron's own code has to read and write them."""
    if current_options().planner != "robust_dcp":
        return False
    from robust_dcp.megatron.versions import uses_multi_storage_client

    if not uses_multi_storage_client():
        return True
    say_stays_stock(
        "every checkpoint of this job",
        "--enable-msc: the Multi-Storage Client's storage is no file system that is mounted",
    )
    return False
