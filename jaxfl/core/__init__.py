"""The numerical core: the protocol of a method, local training, the client map, rounds and scores."""
