"""One file an engine: how its environment is made, its server started, and its requests worded."""
