"""From device to host."""

from robust_dcp.staging.blocks import POOL, Block, BlockLease, BlockPool, aligned_bytes, block_memory
from robust_dcp.staging.device import DeviceCopies
from robust_dcp.staging.host import to_host
from robust_dcp.staging.tensor_bytes import TensorBytes
from robust_dcp.staging.together import flat_bytes, to_host_together

__all__ = [
    "POOL",
    "Block",
    "BlockLease",
    "BlockPool",
    "DeviceCopies",
    "TensorBytes",
    "aligned_bytes",
    "block_memory",
    "flat_bytes",
    "to_host",
    "to_host_together",
]
