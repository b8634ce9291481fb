"""From device to host."""

from robust_dcp.staging.host import to_host
from robust_dcp.staging.together import flat_bytes, to_host_together

__all__ = ["flat_bytes", "to_host", "to_host_together"]
