"""overstory.workers."""
