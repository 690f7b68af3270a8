"""The steps of a model on a mesh, and the batches they take."""
