"""Layouts: bytes of a page, order of a rotated row's elements, and operands of tensor cores."""
