"""Reading items from files into the planner's tensors: the order of reads, pieces and blocks, threads and memory."""
