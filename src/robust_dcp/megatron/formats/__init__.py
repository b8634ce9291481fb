"""The formats torch_dcp and fsdp_dtensor: plain DCP checkpoints."""
