"""What the tests share: real ranks (:mod:`robust_dcp.testing.ranks`). Nothing here is part of the package."""
