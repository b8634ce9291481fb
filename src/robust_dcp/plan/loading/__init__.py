"""What a rank reads: the items of a load plan, and which of them another rank reads for it."""
