"""Shared by heedful's two web servers: uvicorn with connection limits, and a check of each request's host. No models."""
