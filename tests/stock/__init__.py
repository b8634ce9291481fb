"""PyTorch's own tests of distributed checkpoints, run by ``make test-stock``. None of them is in this repository."""
