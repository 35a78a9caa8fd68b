"""``freight bench``: what the machine allows, what Freight reaches of it, and what others reach."""
