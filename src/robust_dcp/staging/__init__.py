"""The way between devices and files: blocks of memory, and the bytes of tensors."""

from robust_dcp.staging.blocks import (
    NOT_PINNED,
    POOL,
    Block,
    BlockLease,
    BlockPool,
    copy_bytes,
    copy_each,
    memory_at,
)
from robust_dcp.staging.device import DeviceCopies
from robust_dcp.staging.numa import stay_near
from robust_dcp.staging.staging_buffers import SHARED_STAGING, STAGING, StagingBuffer, StagingBuffers, TensorForm
from robust_dcp.staging.tensor_bytes import (
    TensorBytes,
    flat_bytes,
    host_address,
    on_cpu,
    parts_in_order,
    to_host,
    to_host_together,
    wait_for_copies,
)

__all__ = [
    "NOT_PINNED",
    "POOL",
    "SHARED_STAGING",
    "STAGING",
    "Block",
    "BlockLease",
    "BlockPool",
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
