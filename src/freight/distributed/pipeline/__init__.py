"""A model cut by layers: stages that hand rows of the residual stream on to each other."""
