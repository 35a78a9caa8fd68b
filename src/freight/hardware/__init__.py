"""Machines as data: compute units, memories and links with their rates, presets and profiles."""
