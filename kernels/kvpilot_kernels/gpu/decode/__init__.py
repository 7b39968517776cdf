"""Decode: attend from a step's tokens to packed pages."""
