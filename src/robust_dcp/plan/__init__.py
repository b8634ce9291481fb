"""From state dicts to plans that all ranks share, and DCP's planners over them."""
