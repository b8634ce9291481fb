"""Makes plans from state dicts that all ranks share, and has DCP's planners that use them."""
