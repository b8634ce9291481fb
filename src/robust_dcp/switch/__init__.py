"""The switch: what is taken over in torch, when its modules are imported, and how all of it is put back."""
