"""What a rank reads in a load: the items of its load plan, and which of them another rank reads for it."""
