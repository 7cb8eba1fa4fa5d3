"""The endpoints of the server, one module for each part of the interface."""
