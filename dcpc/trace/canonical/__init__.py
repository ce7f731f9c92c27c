"""One spelling for each op: the few forms that the sharding rules speak of."""
