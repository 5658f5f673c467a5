"""What both web servers of heedful stand on: uvicorn with limits on connections, and a check of who asks. No model here."""
