"""Steps that are traced once to a graph of PyTorch's operations, split by rows, and run again."""
