"""The proof that a traced program works row by row."""
