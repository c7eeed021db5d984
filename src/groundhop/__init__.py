"""Groundhop: from web pages to a better search agent, with weights hot-loaded into running servers."""

__version__ = "0.1.0"
