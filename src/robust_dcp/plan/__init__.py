"""From a rank's state dict to a plan that all ranks share: structure, agreement, cache, global plan."""
