"""The compiler of agents: it turns coroutines into flow graphs of instructions with copyable state.

Follows section 5 of Hive.
"""
