"""The ranks of a training, and who runs their steps: workers of a pool, or scripts."""
