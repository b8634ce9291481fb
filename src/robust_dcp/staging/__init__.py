"""The way between devices and files: blocks of memory, and the bytes of tensors."""

from robust_dcp.staging.blocks import (
    POOL,
    Block,
    BlockLease,
    BlockPool,
    copy_bytes,
    copy_each,
    memory_at,
)
from robust_dcp.staging.device import CopiesToDevice, DeviceCopies
from robust_dcp.staging.host import on_cpu, to_host, wait_for_copies
from robust_dcp.staging.numa import stay_near
from robust_dcp.staging.staging_buffers import SHARED_STAGING, STAGING, StagingBuffer, StagingBuffers, TensorForm
from robust_dcp.staging.tensor_bytes import TensorBytes, host_address, parts_in_order
from robust_dcp.staging.together import flat_bytes, to_host_together

__all__ = [
    "POOL",
    "SHARED_STAGING",
    "STAGING",
    "Block",
    "BlockLease",
    "BlockPool",
    "CopiesToDevice",
    "DeviceCopies",
    "StagingBuffer",
    "StagingBuffers",
    "TensorBytes",
    "TensorForm",
    "copy_bytes",
    "copy_each",
    "flat_bytes",
    "host_address",
    "memory_at",
    "on_cpu",
    "parts_in_order",
    "stay_near",
    "to_host",
    "to_host_together",
    "wait_for_copies",
]
