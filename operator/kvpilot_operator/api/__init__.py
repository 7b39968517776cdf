"""The API: the spec as frozen structs, from which `make generate` writes the CRD, and what is wrong with an object.

Nothing here talks to a cluster.
"""
