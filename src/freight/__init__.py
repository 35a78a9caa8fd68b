"""Freight: run any open-weight language model over a whole dataset on the hardware at hand."""
