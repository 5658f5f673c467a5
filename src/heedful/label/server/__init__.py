"""The web server on which people label: its pages, its JSON API, and who may ask for what. One process."""
