"""Several processes that run one model: tensors cut over ranks, layers cut into stages."""
