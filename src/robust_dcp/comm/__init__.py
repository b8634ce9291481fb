"""Exchanges between ranks that end on every rank with one verdict, in bounded time and memory.

The only layer that talks to other processes. It knows nothing of plans, files or tensors; every layer above uses
:class:`Channel` and none looks behind it.
"""

from robust_dcp.comm.channel import Channel
from robust_dcp.comm.combine import Agreement, Offer, combined_signature
from robust_dcp.comm.failures import Stopped
from robust_dcp.comm.nodes import node_of
from robust_dcp.comm.relay import Bucket, GroupMover, Relay
from robust_dcp.comm.stats import ExchangeStats, PhaseStats
from robust_dcp.comm.wire import decode, encode

__all__ = [
    "Agreement",
    "Bucket",
    "Channel",
    "ExchangeStats",
    "GroupMover",
    "Offer",
    "PhaseStats",
    "Relay",
    "Stopped",
    "combined_signature",
    "decode",
    "encode",
    "node_of",
]
