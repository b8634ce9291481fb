"""The switch: it replaces functions of torch when their modules are imported, and puts all of them back."""
