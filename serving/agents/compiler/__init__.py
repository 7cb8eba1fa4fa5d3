"""The compiler of agents: coroutines become flow graphs of small instructions whose state can be
copied (Hive, section 5)."""
