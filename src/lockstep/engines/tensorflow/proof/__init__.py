"""The proof that a layer works row by row."""
