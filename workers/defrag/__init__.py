"""Relocation passes in a rank: who holds slot numbers, how they are rewritten, and the audit."""
