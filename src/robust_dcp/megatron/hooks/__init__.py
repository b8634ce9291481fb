"""How robust_dcp gets into an unmodified Megatron: arguments, options, attributes replaced and put back."""
