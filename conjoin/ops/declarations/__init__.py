"""Every operator, by family; each file lists its own in `OPS`."""
