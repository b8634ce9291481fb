"""From device to host."""

from robust_dcp.staging.host import to_host

__all__ = ["to_host"]
