"""Files, processes and people: checkpoints, progress, results."""
