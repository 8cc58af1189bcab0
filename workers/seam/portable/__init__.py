"""Plain torch in place of what SGLang takes from compiled packages on a CPU."""
