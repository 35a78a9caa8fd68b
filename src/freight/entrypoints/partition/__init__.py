"""``freight partition``: how a model is cut over chips, what that costs, what else there is."""
