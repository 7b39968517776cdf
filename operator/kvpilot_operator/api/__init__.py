"""The API: the spec as frozen structs, from which `make generate` writes the CRD, and the faults of an object."""
