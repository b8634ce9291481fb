"""The demo: robust_dcp saves real Megatron-Core and FSDP2 jobs, and stock code reads them back. Start ``run.py``."""
