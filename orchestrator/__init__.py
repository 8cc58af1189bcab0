"""overstory.orchestrator."""
