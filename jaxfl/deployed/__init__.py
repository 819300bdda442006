"""The models of finished runs: loaded, exported, or trained further by a device of its own."""
