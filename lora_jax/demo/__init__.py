"""The demo: a small real model, three adapters that ship with the package, and a run through the server."""
