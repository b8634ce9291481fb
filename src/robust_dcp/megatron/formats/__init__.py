"""Saves and loads of Megatron's formats torch_dcp and fsdp_dtensor, which are plain DCP checkpoints."""
