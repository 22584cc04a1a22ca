"""Plug-ins: the ring in training tools of others, one file for each tool."""
