"""The HTTP server: one engine behind OpenAI's interface, with what this engine has beside it.

    jaxshare serve embedded

Folders: `endpoints` has one module for each part of the interface, `generation` what those that
sample have in common.
"""
