"""Says whether the user chose robust_dcp as the planner, and whether it can be used for this job's storage.

Every replacement in ``save_patches`` and ``load_patches`` asks this first. If the answer is no, it calls Megatron's own
function.
"""

from __future__ import annotations

from robust_dcp.megatron.hooks.options import current_options
from robust_dcp.switch.stock_paths import log_left_to_stock

__all__ = ["is_chosen"]


def is_chosen() -> bool:
    """Whether Megatron's saves and loads go through robust_dcp.

    They do if robust_dcp is the planner and the files are on mounted file systems. With ``--enable-msc`` they are not,
    and only Megatron's own code can read and write them.
    """
    if current_options().planner != "robust_dcp":
        return False
    from robust_dcp.megatron.versions import uses_multi_storage_client

    if not uses_multi_storage_client():
        return True
    log_left_to_stock(
        "every checkpoint of this job",
        "--enable-msc: the Multi-Storage Client's storage is not a mounted file system",
    )
    return False
