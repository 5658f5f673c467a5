"""The web servers: uvicorn with connection limits, which labelling uses too, and reward models over HTTP."""
