"""The OpenAI-compatible HTTP server. Nothing here is imported unless a server is started."""
