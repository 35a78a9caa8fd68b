"""Several processes that run one model: what they say to each other, and how the work is cut."""
