"""overstory.clusters."""
