"""The device mesh, and what turns a model into a sharded one, from outside and in one order."""
