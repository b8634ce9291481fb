"""Exchanges between ranks. Each ends on every rank with the same result, in bounded time and memory.

This is the only layer that talks to other processes. It knows nothing of plans, files or tensors. The layers above use
:class:`Channel` and nothing below it.
"""

from robust_dcp.comm.channel import Channel
from robust_dcp.comm.combine import Agreement, Offer
from robust_dcp.comm.endings import Stopped
from robust_dcp.comm.link import ExchangeStats
from robust_dcp.comm.relay import Bucket, Relay

__all__ = [
    "Agreement",
    "Bucket",
    "Channel",
    "ExchangeStats",
    "Offer",
    "Relay",
    "Stopped",
]
