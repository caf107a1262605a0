"""The mathematics: blocks, attention, drafter, loss, target, decoding. No graph, no file, no process group."""
