"""The Ray Serve application: thin glue around `encoders`, without tensor arithmetic."""

__version__ = "0.1.0"
