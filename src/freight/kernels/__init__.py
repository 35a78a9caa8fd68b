"""Hot loops: a torch reference of each, and faster versions where they can be had."""
