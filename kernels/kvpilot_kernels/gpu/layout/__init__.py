"""Layouts: bytes of a page, slots of a rotated row, and operands of tensor cores."""
