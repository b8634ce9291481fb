"""The arguments and options that robust_dcp adds to an unmodified Megatron."""
