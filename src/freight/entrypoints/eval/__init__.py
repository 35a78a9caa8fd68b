"""``freight eval``: what an approximation costs, by perplexity, last words and exact match."""
