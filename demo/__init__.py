"""The demo: real Megatron-Core and FSDP2 jobs, saved by robust_dcp and read back by stock code. Start: ``run.py``."""
