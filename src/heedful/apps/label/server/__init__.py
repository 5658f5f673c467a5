"""The labelling web server: pages, JSON API, access rules. One process."""
