"""The commands that measure answers: `jaxshare evaluate` and `jaxshare judge`."""
