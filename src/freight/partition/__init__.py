"""How a layer is cut over chips: one sharding algebra, its layouts, their cost, and searches."""
