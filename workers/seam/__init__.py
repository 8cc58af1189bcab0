"""seam."""
